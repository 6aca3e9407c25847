"""The cost of recomputing a block, by operator: seconds, bytes and FLOPs of a real forward pass.

Measures on the device with the given shapes; does not choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from workers.metrics.memory import held_bytes, local_tensor, storage_keys
from workers.training.recompute.checkpointing import Call, OperatorCalls

_CAST = torch.ops.aten._to_copy.default
# outputs that later operators fill; launches of `kernels` are operators that allocate theirs
_UNFILLED = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call: the `nth` of its name from 0, its cost, and whether its outputs may be saved."""

    name: str
    nth: int
    seconds: float
    bytes: int
    flops: int
    keepable: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """A block's operators in order, as far as recomputation runs, and its bytes saved for backward.

    `input_bytes` is what full recomputation saves, `saved_bytes` what no recomputation saves.
    `flops` of the full forward pass, local to this rank.
    """

    operators: tuple[Operator, ...]
    input_bytes: int
    saved_bytes: int
    flops: int

    @property
    def seconds(self) -> float:
        """Time of a recomputation that saves nothing."""
        return sum(each.seconds for each in self.operators)


class Probe:
    """Runs a block unchanged and measures each operator; keeps the fastest of several runs."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._runs: list[_Run] = []

    def __call__(self, plain: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """`plain(*args)`, measured."""
        tables = [each for each in tree_flatten(args[1:])[0] if isinstance(each, Tensor)]
        run = _Run(list(self.block.parameters()), tables, args[0])
        with torch.autograd.graph.saved_tensors_hooks(run.on_saved, lambda tensor: tensor), run:
            out = plain(*args)
        run.finish()
        self._runs.append(run)
        return out

    def profile(self) -> Profile:
        """The profile. Raises RuntimeError if the block did not run."""
        if not self._runs:
            raise RuntimeError("the measured block did not run")
        last = self._runs[-1]
        fastest = [min(some) for some in zip(*(run.seconds for run in self._runs), strict=True)]
        operators = [
            Operator(
                str(func), nth, seconds, size, flops, keepable and index not in last.overwritten
            )
            for index, ((func, nth), seconds, size, flops, keepable) in enumerate(
                zip(last.calls, fastest, last.bytes, last.flops, last.keepable, strict=True)
            )
        ]
        # a checkpoint's second run stops when it has all tensors that the backward pass needs
        return Profile(
            tuple(operators[: last.needed]), last.input_bytes, last.saved_bytes(), sum(last.flops)
        )


class _Run(OperatorCalls):  # type: ignore[no-untyped-call]
    def __init__(self, weights: list[nn.Parameter], tables: list[Tensor], x: Tensor) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.flops: list[int] = []
        self.keepable: list[bool] = []
        self.overwritten: set[int] = set()
        self.needed = 0
        self.input_bytes = held_bytes([x])
        self._apart = storage_keys([*weights, *tables])
        self._weights = storage_keys(weights)
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._maker: dict[int, int] = {}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._cuda = x.device.type == "cuda"

    def on_saved(self, tensor: Tensor) -> Tensor:
        """Called for each tensor that autograd saves."""
        self.needed = len(self.calls)
        storage = local_tensor(tensor).untyped_storage()
        self._saved[storage._cdata] = storage
        return tensor

    def saved_bytes(self) -> int:
        return sum(
            storage.nbytes() for key, storage in self._saved.items() if key not in self._apart
        )

    def finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.seconds = [start.elapsed_time(end) / 1e3 for start, end in self._events]

    def on_call(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        func = call[0]
        out = self._timed(func, args, kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        aliased = bool(storage_keys(inputs) & storage_keys(outputs))
        index = len(self.calls)
        self.calls.append(call)
        self.bytes.append(0 if aliased else held_bytes(outputs))
        self.flops.append(_flops(func, args, kwargs, out))
        self.keepable.append(bool(outputs) and not aliased and not _unkeepable(func, args, kwargs))
        for key in _written(func, args, kwargs):
            self.overwritten.add(self._maker.get(key, index))
        if not aliased:
            self._maker |= dict.fromkeys(storage_keys(outputs), index)
        # a 16-bit copy of a weight is a weight, not an activation
        if (
            func is _CAST
            and storage_keys(inputs) & self._weights
            and outputs[0].element_size() < inputs[0].element_size()
        ):
            self._apart |= storage_keys(outputs)
            self.keepable[index] = False
        return out

    def _timed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            out = func(*args, **kwargs)
            end.record()
            self._events.append((start, end))
            return out
        began = time.perf_counter()
        out = func(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    # torch does not count the CPU kernel; full square, as for the others
    if "scaled_dot_product" in str(func):
        query, key, value = args[:3]
        pairs = query[..., 0].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


def _unkeepable(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Outputs that must be recomputed: random ones (the generator must advance), or filled
    later.
    """
    if str(func).startswith(_UNFILLED):
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # attention kernels are marked as random, but are deterministic without dropout
    names = [each.name for each in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    dropout = (
        args[place]
        if place < len(args)
        else kwargs.get("dropout_p", func._schema.arguments[place].default_value)
    )
    return bool(dropout)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Storages that a call changes in place."""
    written: list[Tensor] = []
    for place, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            written += _tensors(args[place] if place < len(args) else kwargs.get(each.name))
    return storage_keys(written)
