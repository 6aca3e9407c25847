"""Recomputes a block in the backward pass, except outputs of operators that a rule saves.

Uses torch's non-reentrant checkpoint with two dispatch modes. Torch 2.13's
create_selective_checkpoint_contexts keeps saved outputs in a Python dict, where saved-tensor hooks
do not see them, and cannot save the sum of partial products over ranks in their place. Does not
depend on which outputs are worth saving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from workers.metrics.memory import local_tensor
from workers.models.wrapped import Inner

# an operator's call in one run of a block: its overload and the number of its earlier calls
Call = tuple[Any, int]
# from a call and its output: whether to save the output
Rule = Callable[[Call, Any], bool]
_SUMS = frozenset(
    getattr(torch.ops._c10d_functional, name).default
    for name in ("all_reduce", "reduce_scatter_tensor")
)
# add a product to a saved one: W x + B A x of an adapter
_PRODUCT_SUMS = frozenset({torch.ops.aten.addmm.default})
_MOVES = frozenset({torch.ops.aten.cat.default, torch.ops.aten.clone.default})
# the two runs of a checkpoint detach a different number of times
_UNCOUNTED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operator of a block, below autograd, and numbers the calls of each
    from 0.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __enter__(self) -> OperatorCalls:
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
        return self.on_call(call, args, kwargs or {})

    def on_call(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The output of `call`."""
        raise NotImplementedError


class Recomputed:
    """The wrapper of a recomputed block: saves its input and the outputs that `rule` selects.

    Outputs are saved through autograd, so that saved-tensor hooks see them, and live as long as the
    graph. `save_sums`: of a partial product, save its sum over ranks instead. Not `checkpointed`:
    the block saves all that autograd saves. `probe` runs the block in place of all this. `before`
    is called with the block before operators are numbered: work that only some runs do, such as
    gathering weights, belongs there.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        save_sums: bool = False,
        before: Callable[[nn.Module], None] = lambda block: None,
    ) -> None:
        self.rule, self.save_sums, self.before = rule, save_sums, before
        self.checkpointed = True
        self.probe: Callable[[Callable[..., Tensor], tuple[Any, ...]], Tensor] | None = None

    def __call__(self, block: nn.Module, inner: Inner, /, *args: Any) -> Tensor:
        """Run the block."""
        output: Tensor
        if self.probe is not None:
            self.before(block)
            return self.probe(inner, args)
        if not (self.checkpointed and torch.is_grad_enabled()):
            output = inner(*args)
            return output
        rule = self.rule
        if rule is None:
            output = checkpoint(inner, *args, use_reentrant=False)
            return output
        inputs, spec = tree_flatten(args)
        before = partial(self.before, block)
        before()
        save, replay = _SaveMode(rule, self.save_sums), _ReplayMode(before)

        def run_again(*flat: Any) -> Tensor:
            again: Tensor = inner(*tree_unflatten(list(flat), spec))
            return again

        # flat, because a checkpoint saves tensor arguments but not tensors within tuples
        out: Tensor = checkpoint(
            run_again, *inputs, use_reentrant=False, context_fn=lambda: (save, replay)
        )
        if not save.saved:
            return out
        with_saved: Tensor = _SaveForBackward.apply(out, replay, save.saved, *save.tensors)  # type: ignore[no-untyped-call]
        save.forget()  # the checkpoint keeps references to its contexts
        return with_saved


@dataclass(frozen=True, slots=True)
class _SavedIndex:
    """The index of a saved tensor."""

    index: int


@dataclass(frozen=True, slots=True)
class _EmptyTensor:
    """A tensor whose metadata, but not contents, the second run needs."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class _SaveMode(OperatorCalls):  # type: ignore[no-untyped-call]
    """The first run: `saved` has each saved output's structure, with indices into `tensors`.

    With `save_sums`, an output used only in a sum over ranks is replaced by that sum, which is
    smaller if scattered; neither is recomputed.
    """

    def __init__(self, rule: Rule, save_sums: bool) -> None:
        super().__init__()
        self.rule, self.save_sums = rule, save_sums
        self.saved: dict[Call, tuple[TreeSpec, list[Any]]] = {}
        self.tensors: list[Tensor | None] = []
        self._call_by_storage: dict[int, Call] = {}
        self._moved: tuple[Tensor, Call] | None = None

    def on_call(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        func = call[0]
        out = func(*args, **kwargs)
        part = self._source(args[0]) if self._call_by_storage and func in _PRODUCT_SUMS else None
        if part is not None:
            self._replace_by_metadata(part)
            self._save(call, out)
        elif self.rule(call, out):
            self._save(call, out)
        elif self._call_by_storage and func in _MOVES:
            [source, *others] = {
                self._source(each) for each in tree_flatten(args)[0] if isinstance(each, Tensor)
            }
            self._moved = (out, source) if source is not None and not others else None
        elif (
            self._call_by_storage and func in _SUMS and (part := self._source(args[0])) is not None
        ):
            self._replace_by_metadata(part)
            self._save(call, out)
            self._moved = None
        return out

    def _save(self, call: Call, out: Any) -> None:
        leaves, spec = tree_flatten(out)
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                places.append(_SavedIndex(len(self.tensors)))
                # autograd adds a history to `leaf`, which would be a reference cycle
                self.tensors.append(leaf.detach())
                if self.save_sums:
                    self._call_by_storage[_key(leaf)] = call
            else:
                places.append(leaf)
        self.saved[call] = spec, places

    def _source(self, tensor: Tensor) -> Call | None:
        """The saved call that produced this tensor, directly or by a view or copy."""
        if self._moved is not None and _key(self._moved[0]) == _key(tensor):
            return self._moved[1]
        return self._call_by_storage.get(_key(tensor))

    def forget(self) -> None:
        self.saved, self.tensors, self._call_by_storage, self._moved = {}, [], {}, None

    def _replace_by_metadata(self, call: Call) -> None:
        _, leaves = self.saved[call]
        for index, leaf in enumerate(leaves):
            tensor = self.tensors[leaf.index] if isinstance(leaf, _SavedIndex) else None
            if tensor is not None and isinstance(leaf, _SavedIndex):
                leaves[index] = _EmptyTensor(
                    tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
                )
                self.tensors[leaf.index] = None
                self._call_by_storage.pop(_key(tensor), None)


def _key(tensor: Tensor) -> int:
    return int(local_tensor(tensor).untyped_storage()._cdata)


class _ReplayMode(OperatorCalls):  # type: ignore[no-untyped-call]
    """The second run: returns the `saved` outputs instead of calling, each once."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.before = before
        self.saved: dict[Call, tuple[TreeSpec, list[Any]]] = {}

    def __enter__(self) -> _ReplayMode:
        self.before()
        super().__enter__()
        return self

    def on_call(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if call not in self.saved:
            return call[0](*args, **kwargs)
        spec, leaves = self.saved.pop(call)
        return tree_unflatten(
            [leaf.allocate() if isinstance(leaf, _EmptyTensor) else leaf for leaf in leaves], spec
        )


class _SaveForBackward(torch.autograd.Function):
    """Returns a block's output; its backward, the block's first, passes saved outputs to the second
    run.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        replay: _ReplayMode,
        saved: dict[Call, tuple[TreeSpec, list[Any]]],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.replay, ctx.saved = replay, saved
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        for call, (spec, leaves) in ctx.saved.items():
            ctx.replay.saved[call] = (
                spec,
                [tensors[x.index] if isinstance(x, _SavedIndex) else x for x in leaves],
            )
        return gradients[0], None, None, *(None for _ in tensors)
