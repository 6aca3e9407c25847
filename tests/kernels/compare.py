"""What kernel tests share: inputs amid NaN at odd strides, and errors held against plain torch's at
the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.cases import compare

# the interpreter cuts bf16 off, not rounds
FACTORS = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 4.0}


def amid_nan(*shape: int, dtype: torch.dtype = torch.float32, gap: int = 3) -> torch.Tensor:
    """Random normal values as a view into a tensor of NaN: rows have an odd stride, and reading
    past them shows.
    """
    whole = torch.full((*shape[:-1], shape[-1] + 2 * gap), float("nan"), dtype=dtype)
    view = whole[..., gap : gap + shape[-1]]
    view.copy_(torch.randn(shape))
    return view


def assert_close(
    names: Sequence[str],
    ours: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    *,
    factor: float | None = None,
    floor: float | None = None,
) -> None:
    """Each of `ours` errs at most twice (bf16: four times) what `plain` does against the fp64
    `exact`, plus a floor.

    The floor, relative to the largest value, is the dtype's rounding: plain torch may be exact by
    luck.
    """
    for name, got, want, usual in zip(names, ours, exact, plain, strict=True):
        allowed = floor if floor is not None else torch.finfo(got.dtype).eps
        told = compare(name, got, want, usual, factor or FACTORS.get(got.dtype, 2.0), allowed)
        assert told.ok, f"{told.what}: error {told.error:.3g}, allowed {told.allowed:.3g}"
