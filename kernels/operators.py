"""Kernel launches as torch operators, for dispatch modes: recomputation, profilers, FLOP counters.

A launch by itself is not an operator: a dispatch mode sees the allocation but not the kernel that
fills it. Does not depend on any operation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]

# Defined by hand: torch.library.custom_op imports torch's compiler at the first call, which takes
# seconds per process.
_LIBRARY: Any = torch.library.Library("kernels", "FRAGMENT")  # type: ignore[no-untyped-call]
_pending_calls: dict[int, Run] = {}
_call_ids = itertools.count()


def call_as_operator(
    name: str, inputs: Sequence[Tensor | None], run: Run, *, flops: int = 0
) -> list[Tensor]:
    """Returns `run()`, as one call of `torch.ops.kernels.<name>` if a dispatch mode is active.

    `run` returns new tensors only, as many as the inputs and options determine, so that a mode may
    substitute those of an earlier call. Without a mode `run` is called directly: an operator in
    Python costs about 20 us.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return list(run())
    call_id = next(_call_ids)
    _pending_calls[call_id] = run
    try:
        outputs: list[Tensor] = operator(name)([x for x in inputs if x is not None], call_id, flops)
        return outputs
    finally:
        del _pending_calls[call_id]


@functools.cache
def operator(name: str) -> Any:
    """The overload that `call_as_operator` calls: `(Tensor[] inputs, int call, int flops) ->
    Tensor[]`.
    """
    _LIBRARY.define(f"{name}(Tensor[] inputs, int call, int flops) -> Tensor[]")
    _LIBRARY.impl(name, _run, "CompositeExplicitAutograd")
    from torch.utils.flop_counter import register_flop_formula

    packet = getattr(torch.ops.kernels, name)
    register_flop_formula(packet, get_raw=True)(_flops)
    return packet.default


def _run(inputs: list[Tensor], call: int, flops: int) -> list[Tensor]:
    return list(_pending_calls[call]())


def _flops(inputs: list[Tensor], call: int, flops: int, *_: Any, **__: Any) -> int:
    return flops
