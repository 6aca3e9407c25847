"""What running a block again would cost, operator by operator: seconds, bytes and FLOPs of one real
forward pass.

Measures on the device with the shapes it is given; does not choose.
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
from workers.training.recompute.checkpointing import Call, Calls

_CAST = torch.ops.aten._to_copy.default
# outputs that others fill in; launches of our own are operators that make theirs
# (`kernels.operators`)
_UNFILLED = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call: which (`nth` of its name, from 0), what it took, what its outputs hold, whether
    they may be kept.
    """

    name: str
    nth: int
    seconds: float
    bytes: int
    flops: int
    keepable: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """A block's operators in order, as far as a second run gets, and its bytes from forward to
    backward.

    `input_bytes` is what full recomputation keeps, `whole_bytes` what no recomputation does.
    `flops` are those of the
    whole forward pass, local to this rank.
    """

    operators: tuple[Operator, ...]
    input_bytes: int
    whole_bytes: int
    flops: int

    @property
    def seconds(self) -> float:
        """Of a second run that keeps nothing."""
        return sum(each.seconds for each in self.operators)


class Probe:
    """Runs a block as it is and looks at each operator; the fastest of several runs counts."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._runs: list[_Run] = []

    def __call__(self, plain: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """`plain(*args)`, measured."""
        tables = [each for each in tree_flatten(args[1:])[0] if isinstance(each, Tensor)]
        run = _Run(list(self.block.parameters()), tables, args[0])
        with torch.autograd.graph.saved_tensors_hooks(run.saved, lambda tensor: tensor), run:
            out = plain(*args)
        run.finish()
        self._runs.append(run)
        return out

    def profile(self) -> Profile:
        """Raises RuntimeError where the block did not run."""
        if not self._runs:
            raise RuntimeError("a block was to be measured and has not run")
        last = self._runs[-1]
        fastest = [min(some) for some in zip(*(run.seconds for run in self._runs), strict=True)]
        operators = [
            Operator(str(func), nth, seconds, size, flops, keepable and index not in last.spoilt)
            for index, ((func, nth), seconds, size, flops, keepable) in enumerate(
                zip(last.calls, fastest, last.bytes, last.flops, last.keepable, strict=True)
            )
        ]
        # a checkpoint's second run stops as soon as all that the backward pass wants is there again
        return Profile(
            tuple(operators[: last.wanted]), last.input_bytes, last.whole_bytes(), sum(last.flops)
        )


class _Run(Calls):  # type: ignore[no-untyped-call]
    def __init__(self, weights: list[nn.Parameter], tables: list[Tensor], x: Tensor) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.flops: list[int] = []
        self.keepable: list[bool] = []
        self.spoilt: set[int] = set()
        self.wanted = 0
        self.input_bytes = held_bytes([x])
        self._apart = storage_keys([*weights, *tables])
        self._weights = storage_keys(weights)
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._maker: dict[int, int] = {}
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._cuda = x.device.type == "cuda"

    def saved(self, tensor: Tensor) -> Tensor:
        """Told of each tensor that autograd saves."""
        self.wanted = len(self.calls)
        storage = local_tensor(tensor).untyped_storage()
        self._saved[storage._cdata] = storage
        return tensor

    def whole_bytes(self) -> int:
        return sum(
            storage.nbytes() for key, storage in self._saved.items() if key not in self._apart
        )

    def finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.seconds = [start.elapsed_time(end) / 1e3 for start, end in self._events]

    def called(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        func = call[0]
        out = self._timed(func, args, kwargs)
        given, made = _tensors((args, kwargs)), _tensors(out)
        aliased = bool(storage_keys(given) & storage_keys(made))
        index = len(self.calls)
        self.calls.append(call)
        self.bytes.append(0 if aliased else held_bytes(made))
        self.flops.append(_flops(func, args, kwargs, out))
        self.keepable.append(bool(made) and not aliased and not _unkeepable(func, args, kwargs))
        for key in _written(func, args, kwargs):
            self.spoilt.add(self._maker.get(key, index))
        if not aliased:
            self._maker |= dict.fromkeys(storage_keys(made), index)
        # a 16-bit copy of a weight is a weight, no activation
        if (
            func is _CAST
            and storage_keys(given) & self._weights
            and made[0].element_size() < given[0].element_size()
        ):
            self._apart |= storage_keys(made)
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
    # torch does not count the CPU's kernel; the whole square, as for the others
    if "scaled_dot_product" in str(func):
        query, key, value = args[:3]
        pairs = query[..., 0].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


def _unkeepable(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Outputs that must be made again: random ones (the generator has to move on alike), and what
    is filled later.
    """
    if str(func).startswith(_UNFILLED):
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # attention kernels are marked as random, and are not without dropout
    names = [each.name for each in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = (
        args[place]
        if place < len(args)
        else kwargs.get("dropout_p", func._schema.arguments[place].default_value)
    )
    return bool(given)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Storages that a call changes in place."""
    found: list[Tensor] = []
    for place, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found += _tensors(args[place] if place < len(args) else kwargs.get(each.name))
    return storage_keys(found)
