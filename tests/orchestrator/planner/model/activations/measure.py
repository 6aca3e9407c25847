"""Bytes that a stack of blocks saves for its backward pass, measured on fake tensors.

Uses autograd's hooks and MemTracker. Bytes of one block are the difference between stacks of two
heights. Does not depend on formulas.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Build = Callable[[], nn.Module]
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def saved_bytes(
    build: Build,
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    recompute: str,
) -> int:
    """Of one block, by `saved_tensors_hooks`: each storage once, parameters and shared tables left
    out.

    Blind to what selective checkpoints cache.
    """
    return _slope(partial(_hooked, build, arguments, shape, dtype, recompute))


def tracked_bytes(
    build: Build,
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    recompute: str,
) -> int:
    """Of one block, by `MemTracker`: all that is alive after the forward pass but parameters."""
    return _slope(partial(_tracked, build, arguments, shape, dtype, recompute))


def _slope(of_height: Callable[[int], int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of_height(2) - of_height(1)


def _hooked(
    build: Build, arguments: Any, shape: Any, dtype: torch.dtype, recompute: str, height: int
) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        blocks, arguments, x = _stack(build, arguments, shape, dtype, height)
        given = _storages([*blocks.parameters(), *_tensors(arguments)])
        held: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                held[storage._cdata] = storage
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            saved = _forward(blocks, x, arguments, recompute)
        del saved
        return sum(storage.nbytes() for storage in held.values())


def _tracked(
    build: Build, arguments: Any, shape: Any, dtype: torch.dtype, recompute: str, height: int
) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        blocks, arguments, x = _stack(build, arguments, shape, dtype, height)
        tracker = MemTracker()
        tracker.track_external(blocks, *_tensors(arguments))
        with tracker:
            saved = _forward(blocks, x, arguments, recompute)
            held = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        del saved
        return int(
            sum(
                value
                for kind, value in held.items()
                if _name(kind) in {"Activation", "Temp", "Inputs"}
            )
        )


def _name(kind: object) -> str:
    return str(getattr(kind, "value", kind))


def _stack(build: Build, arguments: Any, shape: Any, dtype: torch.dtype, height: int) -> Any:
    torch.set_default_dtype(dtype)
    try:
        blocks = nn.ModuleList(build() for _ in range(height))
    finally:
        torch.set_default_dtype(torch.float32)
    fake = tuple(_fake(each) for each in arguments)
    return blocks, fake, torch.empty(shape, dtype=dtype, requires_grad=True)


def _fake(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(torch.empty(each.shape, dtype=each.dtype) for each in argument)
    return argument


def _forward(
    blocks: nn.ModuleList, x: Tensor, arguments: tuple[Any, ...], recompute: str
) -> Tensor:
    for block in blocks:
        if recompute == "full":
            x = checkpoint(block, x, *arguments, use_reentrant=False)
        elif recompute == "products":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            x = checkpoint(block, x, *arguments, use_reentrant=False, context_fn=contexts)
        else:
            x = block(x, *arguments)
    return x


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_core(module: nn.Module) -> None:
    """Wrap every attention core of a block, as Megatron's selective recomputation does."""
    for child in module.modules():
        if type(child).__name__ == "Core":
            child.forward = partial(checkpoint, child.forward, use_reentrant=False)  # type: ignore[method-assign]


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    flat = [
        each
        for argument in arguments
        for each in (argument if isinstance(argument, tuple) else (argument,))
    ]
    return [each for each in flat if isinstance(each, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}
