"""Shared helpers of kernel tests: inputs surrounded by NaN, and error limits relative to plain
torch's errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.cases import compare

# the interpreter truncates to bf16
FACTORS = {torch.float32: 2.0, torch.float16: 2.0, torch.bfloat16: 4.0}


def nan_padded(*shape: int, dtype: torch.dtype = torch.float32, gap: int = 3) -> torch.Tensor:
    """Random normal values as a view into a tensor of NaN: rows have an odd stride, and reads past
    them show.
    """
    full = torch.full((*shape[:-1], shape[-1] + 2 * gap), float("nan"), dtype=dtype)
    view = full[..., gap : gap + shape[-1]]
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
    """Asserts that each of `ours` errs at most twice (bf16: four times) as much as `plain` against
    the fp64 `exact`.

    A floor is added: the dtype's rounding relative to the largest value, because plain torch may be
    exact by chance.
    """
    for name, got, want, usual in zip(names, ours, exact, plain, strict=True):
        allowed = floor if floor is not None else torch.finfo(got.dtype).eps
        record = compare(name, got, want, usual, factor or FACTORS.get(got.dtype, 2.0), allowed)
        assert record.ok, f"{record.what}: error {record.error:.3g}, allowed {record.allowed:.3g}"
