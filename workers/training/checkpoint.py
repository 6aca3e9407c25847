"""Distributed checkpoints: written beside training, complete or absent, read back under any plan.

Tensors go by their unwrapped names through torch.distributed.checkpoint, so that any ZeRO stage and
any number of ranks
reads what any other wrote. Does not know steps' numbers beyond those it is given.
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

from workers.contracts.specs.run_bodies import CheckpointSpec
from workers.models.weights.checkpoint_table import checkpoint_reader
from workers.models.weights.manifest import complete_checkpoints, step_folder, write_manifest
from workers.training.optim import fill_state, get_optimizer_state
from workers.training.parallel.group_cache import cached_group
from workers.training.parallel.mesh import World, init_process_group

_SAVER = "torch.distributed.checkpoint.state_dict_saver"


@dataclass(frozen=True, slots=True)
class Saved:
    """`seconds` until it was complete; for `stall_s` of them the training of rank 0 stood still."""

    step: int
    tokens: int
    path: Path
    seconds: float
    stall_s: float
    bytes: int


class Checkpointer:
    """Saves to `root/step-N`; at most one save is under way.

    A save writes to a hidden folder; when every rank has finished, rank 0 adds the manifest and
    renames. `on_saved` is
    called on rank 0 only, from the thread that finished it. An asynchronous save holds the loop for
    a copy of the
    tensors, into the same memory each time: fresh pages cost three times the copy itself.
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
        if spec is not None:  # here nothing waits for it: 0.4 s of imports, and the group
            import_module(_SAVER)
            if world.size > 1:
                self._meet()

    def save(
        self, tensors: dict[str, Any], *, step: int, manifest: dict[str, Any], wait: bool
    ) -> None:
        """Start a save on all ranks; returns after the tensors are copied, or with `wait` after the
        rename.
        """
        dcp: Any = import_module(_SAVER)
        started = time.perf_counter()
        self.finish()
        self._meet()
        beside = self.root / f".{step_folder(step)}.{self.tag}"
        if self.world.rank == 0:
            for left in self.root.glob(".step-*"):  # by an attempt that ended while it wrote
                shutil.rmtree(left, ignore_errors=True)
            beside.mkdir(parents=True)
        self.world.barrier()
        beyond = self.async_ and not wait
        if beyond:
            if self._stager is None:
                self._stager = _stager(pinned=self.world.device.type == "cuda")
            self._pending = dcp.async_save(
                tensors,
                storage_writer=_writer(beside),
                process_group=self._group,
                async_stager=self._stager,
            )
            assert isinstance(self._pending, Future)
        else:
            dcp.save(tensors, storage_writer=_writer(beside), process_group=self._group)
            self._pending = Future()
            self._pending.set_result(None)
        stall_s = time.perf_counter() - started
        if self.world.rank == 0:
            self._pending = _then(
                self._pending,
                lambda: self._complete(
                    beside, step, manifest, started, stall_s if beyond else None
                ),
            )
        if not beyond:
            self.finish()

    def finish(self) -> None:
        """Wait for a save under way. Raises what it failed with."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _meet(self) -> None:
        """A group of its own: the writing thread's collectives must not mix with the step's."""
        if self._group is None:
            _need_group()
            self._group = cached_group(
                "checkpoint", lambda: dist.new_group(backend="gloo", group_desc="checkpoint")
            )

    def _complete(
        self,
        beside: Path,
        step: int,
        manifest: dict[str, Any],
        started: float,
        stall_s: float | None,
    ) -> None:
        target = self.root / step_folder(step)
        size = write_manifest(beside, manifest)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        # later steps are of a course that a rewind gave up, or damaged
        complete = complete_checkpoints(self.root)
        later = [folder for folder in complete if folder.name > target.name]
        for old in [*later, *complete[len(later) + self.keep :]]:
            shutil.rmtree(old, ignore_errors=True)
        seconds = time.perf_counter() - started
        tokens = int(manifest.get("tokens", 0))
        self.on_saved(
            Saved(step, tokens, target, seconds, seconds if stall_s is None else stall_s, size)
        )


def training_tensors(weights: dict[str, Tensor], optimizer: Optimizer) -> dict[str, Any]:
    """`model.<name>` and `optim.<name>.<key>`: what a checkpoint holds, of this rank, by names free
    of any wrapping.

    `weights` are the parameters and what else belongs to the model's state.
    """
    found: dict[str, Any] = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    state = get_optimizer_state(optimizer)
    for name, parameter in weights.items():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optim.{name}.{key}"] = value
    return found


def load_training(folder: Path, weights: dict[str, Tensor], optimizer: Optimizer) -> None:
    """Read weights and optimizer state in place, each rank what it holds under its own plan."""
    from torch.distributed.checkpoint.state_dict_loader import load

    fill_state(optimizer, [tensor for tensor in weights.values() if tensor.requires_grad])
    tensors = training_tensors(weights, optimizer)
    _need_group()
    load(tensors, storage_reader=checkpoint_reader(folder))


def _need_group() -> None:
    """A process on its own gets a group of one: torch's checkpoints then go the same way as among
    many.
    """
    if not dist.is_initialized():
        init_process_group(alone=True)


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)


def _stager(*, pinned: bool) -> Any:
    """Copies tensors to the host before training goes on, and keeps the memory of the copies for
    the next time.
    """
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
    """A future for `action` run once `first` is done well; errors of either are its error."""
    second: Future[Any] = Future()

    def run(done: Future[Any]) -> None:
        try:
            done.result()
            action()
        except BaseException as error:  # carried to whoever waits
            second.set_exception(error)
        else:
            second.set_result(None)

    first.add_done_callback(run)
    return second
