"""A block that is run again in the backward pass, but for the outputs of operators that a rule
keeps.

The way: torch's non-reentrant checkpoint with two dispatch modes as its contexts. Knows operators
by name and order of
call; does not know which are worth keeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from workers.metrics.memory import local_tensor

# an operator's call in one run of a block: its overload and how many calls of it came before
Call = tuple[Any, int]
# given a call and its output, whether the output is kept
Rule = Callable[[Call, Any], bool]
_SUMS = frozenset(
    getattr(torch.ops._c10d_functional, name).default
    for name in ("all_reduce", "reduce_scatter_tensor")
)
_MOVES = frozenset({torch.ops.aten.cat.default, torch.ops.aten.clone.default})
# a checkpoint detaches a different number of times in its two runs
_UNCOUNTED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a block, below autograd, and numbers the calls of each from 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __enter__(self) -> Calls:
        self.counts.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _UNCOUNTED:
            return func(*args, **(kwargs or {}))
        call = (func, self.counts[func])
        self.counts[func] += 1
        return self.called(call, args, kwargs or {})

    def called(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The output of `call`."""
        raise NotImplementedError


class Recomputed:
    """In place of a block's forward method: keeps the block's input and what `rule` says; None
    keeps no more.

    What is kept is saved through autograd, so that hooks on saved tensors see it, and lives as long
    as the graph does.
    With `sums`, of a product that ranks hold parts of, their sum is kept instead. Not
    `checkpointed`, the block keeps
    all that autograd saves. A `probe` runs it once in place of all this. `before` is called where
    operators are about
    to be numbered: what happens in one run of the block and not in another, such as gathering
    weights, belongs there.
    """

    def __init__(
        self,
        plain: Callable[..., Tensor],
        rule: Rule | None = None,
        *,
        sums: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.plain, self.rule, self.sums, self.before = plain, rule, sums, before
        self.checkpointed = True
        self.probe: Callable[[Callable[..., Tensor], tuple[Any, ...]], Tensor] | None = None

    def __call__(self, *args: Any) -> Tensor:
        if self.probe is not None:
            self.before()
            return self.probe(self.plain, args)
        if not (self.checkpointed and torch.is_grad_enabled()):
            return self.plain(*args)
        rule = self.rule
        if rule is None:
            whole: Tensor = checkpoint(self.plain, *args, use_reentrant=False)
            return whole
        given, spec = tree_flatten(args)
        self.before()
        keep, replay = _Keep(rule, self.sums), _Replay(self.before)

        def again(*flat: Any) -> Tensor:
            return self.plain(*tree_unflatten(list(flat), spec))

        # flat, because a checkpoint saves tensors among its arguments but not within tuples
        out: Tensor = checkpoint(
            again, *given, use_reentrant=False, context_fn=lambda: (keep, replay)
        )
        if not keep.kept:
            return out
        held: Tensor = _Held.apply(out, replay, keep.kept, *keep.tensors)  # type: ignore[no-untyped-call]
        keep.forget()  # the checkpoint holds on to its contexts
        return held


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a kept tensor stands among the kept ones."""

    index: int


@dataclass(frozen=True, slots=True)
class _Hollow:
    """A tensor that is wanted in the second run, but not what is in it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class _Keep(Calls):  # type: ignore[no-untyped-call]
    """The first run: `kept` has each kept output's structure, its tensors replaced by their places
    in `tensors`.

    With `sums`, an output that goes into a sum over ranks alone gives way to that sum, which is
    smaller where it is
    scattered; neither is computed again.
    """

    def __init__(self, rule: Rule, sums: bool) -> None:
        super().__init__()
        self.rule, self.sums = rule, sums
        self.kept: dict[Call, tuple[TreeSpec, list[Any]]] = {}
        self.tensors: list[Tensor | None] = []
        self._whose: dict[int, Call] = {}
        self._moved: tuple[Tensor, Call] | None = None

    def called(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        func = call[0]
        out = func(*args, **kwargs)
        if self.rule(call, out):
            self._keep(call, out)
        elif self._whose and func in _MOVES:
            [source, *others] = {
                self._source(each) for each in tree_flatten(args)[0] if isinstance(each, Tensor)
            }
            self._moved = (out, source) if source is not None and not others else None
        elif self._whose and func in _SUMS and (part := self._source(args[0])) is not None:
            self._hollow(part)
            self._keep(call, out)
            self._moved = None
        return out

    def _keep(self, call: Call, out: Any) -> None:
        leaves, spec = tree_flatten(out)
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                places.append(_Place(len(self.tensors)))
                # autograd is about to give `leaf` a history, which would hold itself
                self.tensors.append(leaf.detach())
                if self.sums:
                    self._whose[_key(leaf)] = call
            else:
                places.append(leaf)
        self.kept[call] = spec, places

    def _source(self, tensor: Tensor) -> Call | None:
        """The kept call whose output this is, seen or moved as it may be."""
        if self._moved is not None and _key(self._moved[0]) == _key(tensor):
            return self._moved[1]
        return self._whose.get(_key(tensor))

    def forget(self) -> None:
        self.kept, self.tensors, self._whose, self._moved = {}, [], {}, None

    def _hollow(self, call: Call) -> None:
        _, leaves = self.kept[call]
        for index, leaf in enumerate(leaves):
            tensor = self.tensors[leaf.index] if isinstance(leaf, _Place) else None
            if tensor is not None and isinstance(leaf, _Place):
                leaves[index] = _Hollow(
                    tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
                )
                self.tensors[leaf.index] = None
                self._whose.pop(_key(tensor), None)


def _key(tensor: Tensor) -> int:
    return int(local_tensor(tensor).untyped_storage()._cdata)


class _Replay(Calls):  # type: ignore[no-untyped-call]
    """The second run: `given` outputs in place of calls, each once."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.before = before
        self.given: dict[Call, tuple[TreeSpec, list[Any]]] = {}

    def __enter__(self) -> _Replay:
        self.before()
        super().__enter__()
        return self

    def called(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if call not in self.given:
            return call[0](*args, **kwargs)
        spec, leaves = self.given.pop(call)
        return tree_unflatten(
            [leaf.made() if isinstance(leaf, _Hollow) else leaf for leaf in leaves], spec
        )


class _Held(torch.autograd.Function):
    """Passes a block's output through; its backward pass, the block's first, hands what was kept to
    the second run.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        replay: _Replay,
        kept: dict[Call, tuple[TreeSpec, list[Any]]],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.replay, ctx.kept = replay, kept
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        for call, (spec, leaves) in ctx.kept.items():
            ctx.replay.given[call] = (
                spec,
                [tensors[x.index] if isinstance(x, _Place) else x for x in leaves],
            )
        return gradients[0], None, None, *(None for _ in tensors)
