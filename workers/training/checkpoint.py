"""Distributed checkpoints: written asynchronously, complete or absent, readable under any plan.

Tensors have unwrapped names in torch.distributed.checkpoint, so that any ZeRO stage and any number
of ranks can read them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from workers.contracts.specs.train import CheckpointSpec
from workers.models.weights.checkpoint_table import checkpoint_reader
from workers.models.weights.manifest import complete_checkpoints, step_folder, write_manifest
from workers.training.optim import fill_state, get_optimizer_state
from workers.training.parallel.group_cache import cached_group
from workers.training.parallel.mesh import World, init_process_group

_SAVER = "torch.distributed.checkpoint.state_dict_saver"


@dataclass(frozen=True, slots=True)
class Saved:
    """A finished save: `seconds` until complete; rank 0 did not train for `stall_s` of them."""

    step: int
    tokens: int
    path: Path
    seconds: float
    stall_s: float
    bytes: int


class Checkpointer:
    """Saves to `root/step-N`, one save at a time.

    A save writes to a hidden folder; each rank hashes its file. When every rank has finished, rank
    0 adds the manifest and renames the folder. `on_saved` is called on rank 0, from the thread that
    finished the save. An asynchronous save blocks the loop while it copies the tensors, into the
    same memory each time,
    because new pages cost three times the copy.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        spec: CheckpointSpec | None,
        tag: str,
        on_saved: Callable[[Saved], None],
    ) -> None:
        self.root, self.world, self.tag, self.on_saved = root, world, tag, on_saved
        self.keep = spec.keep if spec else 3
        self.async_ = spec.async_ if spec else False
        self._group: Any = None
        self._stager: Any = None
        self._pending: Future[Any] | None = None
        if spec is not None:  # 0.4 s of imports and the group, before training starts
            import_module(_SAVER)
            if world.size > 1:
                self._create_group()

    def save(
        self,
        tensors: dict[str, Any],
        *,
        step: int,
        manifest: dict[str, Any],
        wait: bool,
        write_more: Callable[[Path], None] | None = None,
    ) -> None:
        """Start a save on all ranks; return after the copy, or with `wait` after the rename.

        On rank 0 `write_more` adds files to the folder.
        """
        dcp: Any = import_module(_SAVER)
        started = time.perf_counter()
        self.finish()
        self._create_group()
        temporary = self.root / f".{step_folder(step)}.{self.tag}"
        if self.world.rank == 0:
            for unfinished in self.root.glob(".step-*"):  # of an attempt that ended during a save
                shutil.rmtree(unfinished, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.world.barrier()
        in_background = self.async_ and not wait
        if in_background:
            if self._stager is None:
                self._stager = _stager(pinned=self.world.device.type == "cuda")
            self._pending = dcp.async_save(
                tensors,
                storage_writer=_writer(temporary),
                process_group=self._group,
                async_stager=self._stager,
            )
            assert isinstance(self._pending, Future)
        else:
            dcp.save(tensors, storage_writer=_writer(temporary), process_group=self._group)
            self._pending = Future()
            self._pending.set_result(None)
        stall_s = time.perf_counter() - started
        if self.world.rank == 0:
            self._pending = _then(
                self._pending,
                lambda: self._complete(
                    temporary,
                    step,
                    manifest,
                    started,
                    stall_s if in_background else None,
                    write_more,
                ),
            )
        if not in_background:
            self.finish()

    def finish(self) -> None:
        """Wait for a running save; raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _create_group(self) -> None:
        """Create a separate group: collectives of the writing thread must not mix with the step."""
        if self._group is None:
            _ensure_group()
            self._group = cached_group(
                "checkpoint", lambda: dist.new_group(backend="gloo", group_desc="checkpoint")
            )

    def _complete(
        self,
        temporary: Path,
        step: int,
        manifest: dict[str, Any],
        started: float,
        stall_s: float | None,
        write_more: Callable[[Path], None] | None,
    ) -> None:
        target = self.root / step_folder(step)
        if write_more is not None:
            write_more(temporary)
        from workers.training.hashing_writer import take_digests

        size = write_manifest(temporary, manifest, digests=take_digests(temporary))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        # later steps were discarded by a rewind, or are damaged
        complete = complete_checkpoints(self.root)
        later = [folder for folder in complete if folder.name > target.name]
        for old in [*later, *complete[len(later) + self.keep :]]:
            shutil.rmtree(old, ignore_errors=True)
        seconds = time.perf_counter() - started
        tokens = int(manifest.get("tokens", 0))
        self.on_saved(
            Saved(step, tokens, target, seconds, seconds if stall_s is None else stall_s, size)
        )


def training_tensors(
    weights: dict[str, Tensor], optimizer: Optimizer, *, model: str = "model", optim: str = "optim"
) -> dict[str, Any]:
    """This rank's tensors by unwrapped name: `model.<name>` and `optim.<name>.<key>`.

    `weights`: the parameters and the model's other state. A second model has other prefixes.
    """
    tensors: dict[str, Any] = {
        f"{model}.{name}": tensor.detach() for name, tensor in weights.items()
    }
    state = get_optimizer_state(optimizer)
    for name, parameter in weights.items():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{optim}.{name}.{key}"] = value
    return tensors


def load_training(
    folder: Path,
    weights: dict[str, Tensor],
    optimizer: Optimizer,
    *,
    model: str = "model",
    optim: str = "optim",
) -> None:
    """Read weights and optimizer state in place: each rank reads its own shards.

    Prefixes as in `training_tensors`.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    fill_state(optimizer, [tensor for tensor in weights.values() if tensor.requires_grad])
    tensors = training_tensors(weights, optimizer, model=model, optim=optim)
    _ensure_group()
    load(tensors, storage_reader=checkpoint_reader(folder))


def _ensure_group() -> None:
    """A single process gets a group of one, which torch's checkpoints require."""
    if not dist.is_initialized():
        init_process_group(alone=True)


def _writer(folder: Path) -> Any:
    from workers.training.hashing_writer import HashingWriter

    return HashingWriter(folder)


def _stager(*, pinned: bool) -> Any:
    """Copies tensors to the host before training continues, and reuses the memory of the copies."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
    )


def _then(first: Future[Any], action: Callable[[], None]) -> Future[Any]:
    """A future for `action`, run after `first` succeeds; it has the error of either."""
    second: Future[Any] = Future()

    def run(done: Future[Any]) -> None:
        try:
            done.result()
            action()
        except BaseException as error:  # re-raised in `finish`
            second.set_exception(error)
        else:
            second.set_result(None)

    first.add_done_callback(run)
    return second
