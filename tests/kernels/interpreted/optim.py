"""The kernels of unscale_ and FusedAdamW over many ragged tensors, against torch: scale, clip,
skip, rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import FusedAdamW, unscale_
from tests.kernels.compare import assert_close
from tests.matrix import select

SHAPES = [(3, 50), (64,), (1,), (0,), (130,), (2, 64)]  # chunks of 64 and remainders


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize("dtype", select([torch.float32, torch.bfloat16, torch.float16]))
def test_unscale_(dtype: torch.dtype) -> None:
    base = torch.randn(101, dtype=dtype)
    originals = [torch.randn(s, dtype=dtype) for s in SHAPES] + [
        base[1:]
    ]  # the last is not aligned
    mixed = [*(g.clone() for g in originals[:-1]), base.clone()[1:], torch.ones(5)]
    overflow = scalar(0.0)
    unscale_(mixed, scalar(0.25), overflow, backend="own")
    torch.testing.assert_close(mixed, [*(g * 0.25 for g in originals), torch.full((5,), 0.25)])
    assert overflow.item() == 0
    for bad in (float("inf"), float("-inf"), float("nan")):
        overflow = scalar(0.0)
        grads = [torch.ones(70, dtype=dtype), torch.ones(130, dtype=dtype)]
        grads[1][129] = bad
        unscale_(grads, scalar(0.5), overflow, backend="own")
        assert overflow.item() == 1 and grads[0][0] == 0.5


def trained(
    make: Any, dtype: torch.dtype, steps: int = 4, scale: float | None = None
) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(3)
    params = [torch.randn(s).to(dtype).requires_grad_() for s in SHAPES]
    groups = [{"params": params[:3], "weight_decay": 0.0}, {"params": params[3:], "lr": 0.02}]
    optimizer = make(groups)
    for _ in range(steps):
        for p in params:
            p.grad = (torch.randn(p.shape) * (scale or 1.0)).to(dtype)
        if isinstance(optimizer, FusedAdamW):
            optimizer.step(inv_scale=None if scale is None else scalar(1 / scale))
        else:
            if scale is not None:
                unscale_([p.grad for p in params], scalar(1 / scale), scalar(0.0))
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
    return [p.detach() for p in params], optimizer


@pytest.mark.parametrize("scale", select([8.0, None]))
def test_it_matches_torchs_adamw_with_clipping(scale: float | None) -> None:
    def ours(groups: Any) -> FusedAdamW:
        return FusedAdamW(groups, lr=0.01, clip_norm=0.5, backend="own")

    def theirs(groups: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, lr=0.01)

    got, optimizer = trained(ours, torch.float32, scale=scale)
    expected, other = trained(theirs, torch.float32, scale=scale)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert optimizer.skipped.item() == 0 and optimizer.grad_norm.item() > 1
    for a, b in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        # the same names, counts and moments: each loads the other's
        torch.testing.assert_close(a, b)


def test_half_precision_errors_are_those_of_the_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        ours = trained(lambda g: FusedAdamW(g, lr=0.01, clip_norm=0.5, backend="own"), dtype)[0]
        plain = trained(
            lambda g: FusedAdamW(g, lr=0.01, clip_norm=0.5, backend="reference"), dtype
        )[0]
        wide = trained(
            lambda g: FusedAdamW(g, lr=0.01, clip_norm=0.5, backend="reference"), torch.float32
        )[0]
        non_empty = [i for i, s in enumerate(SHAPES) if 0 not in s]
        assert_close(
            [str(SHAPES[i]) for i in non_empty],
            *([t[i] for i in non_empty] for t in (ours, wide, plain)),
        )


def test_an_overflow_changes_nothing_and_counts_no_step() -> None:
    p = torch.ones(200, requires_grad=True)
    optimizer = FusedAdamW([p], clip_norm=1.0, backend="own")
    p.grad = torch.ones(200)
    optimizer.step()
    before = p.detach().clone()
    p.grad[190] = float("inf")
    optimizer.step()
    assert (
        optimizer.skipped.item() == 1
        and torch.equal(p, before)
        and optimizer.state[p]["step"].item() == 1
    )
    p.grad = torch.ones(200)
    optimizer.step(found_inf=scalar(1.0))
    assert optimizer.skipped.item() == 1 and torch.equal(p, before)
    optimizer.step(grad_norm=scalar(100.0))
    assert optimizer.state[p]["step"].item() == 2 and optimizer.grad_norm.item() == 100


def test_stochastic_rounding_keeps_the_expectation_and_is_reproducible() -> None:
    def last(seed: int) -> torch.Tensor:
        p = torch.ones(2048, dtype=torch.bfloat16).requires_grad_()
        optimizer = FusedAdamW(
            [p], lr=1e-3, weight_decay=0.0, stochastic_rounding=True, seed=seed, backend="own"
        )
        p.grad = torch.ones_like(p)
        optimizer.step()  # to 0.999, a quarter of the way from 1 to the next number below
        return p.detach().float()

    p = last(1)
    assert set(p.unique().tolist()) == {1.0, 1 - 2**-8}
    assert abs(p.mean().item() - 0.999) < 4 * 2**-8 * 0.44 / 45  # four standard errors
    assert torch.equal(p, last(1)) and not torch.equal(p, last(2))


def test_second_moments_match_torch_to_the_last_digits() -> None:
    param = torch.randn(200)
    pair = [param.clone().requires_grad_() for _ in range(2)]
    optimizers = [FusedAdamW(pair[:1], backend="own"), torch.optim.AdamW(pair[1:])]
    for _ in range(3):
        gradient = torch.randn(200)
        for p, optimizer in zip(pair, optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    ours, theirs = (
        optimizer.state[p]["exp_avg_sq"] for p, optimizer in zip(pair, optimizers, strict=True)
    )
    # 1 - 0.999 taken in fp32 would be off by 1e-5
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0.0)
