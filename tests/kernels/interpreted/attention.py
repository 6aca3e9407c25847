"""The attention kernels in the interpreter: forward, backward and the sm_90 variant, on ragged
shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels
from kernels import attention, attention_varlen, tuning
from kernels.attention.reference import reference
from kernels.attention.spec import Bounds, make_spec
from kernels.attention.triton_kernels import launch
from kernels.attention.triton_kernels.launch_tma import tma_why_not
from tests.kernels.compare import assert_close, nan_padded
from tests.matrix import select

NAMES = ("out", "lse", "dq", "dk", "dv")
# batch, queries, keys, heads, key-value heads, D, D_v
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full, grouped, ragged ends": ((1, 19, 37, 4, 2, 16, 16), {}),
    "causal, more keys": ((2, 23, 41, 2, 1, 16, 16), {"causal": True}),
    "causal, queries that see nothing": ((1, 37, 21, 2, 2, 16, 16), {"causal": True}),
    "many query heads a key-value head, summed in parts": (
        (1, 18, 33, 6, 1, 16, 16),
        {"causal": True},
    ),
    "window": ((1, 45, 53, 2, 1, 16, 16), {"window": 13}),
    "window of one and a softcap": ((1, 20, 20, 1, 1, 16, 16), {"window": 1, "softcap": 3.0}),
    "softcap and scale": (
        (1, 20, 33, 2, 1, 16, 16),
        {"softcap": 2.0, "causal": True, "scale": 0.6},
    ),
    "latent head dims in two parts": ((1, 17, 18, 1, 1, 48, 32), {"causal": True}),
    "head dims that powers of two do not fill": ((1, 17, 18, 1, 1, 20, 44), {"causal": True}),
    "no keys": ((1, 5, 0, 2, 1, 16, 16), {}),
}
DEFAULT = [3, 7]  # sums in chunks over query heads under a mask; head dims in two parts


def _tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Views into NaN, so that values read past a row or a sequence's end show."""
    b, q, k, h, h_kv, d, dv = shape
    sizes = ((b, q, h, d), (b, k, h_kv, d), (b, k, h_kv, dv))
    return [nan_padded(*size, dtype=dtype, gap=4).requires_grad_() for size in sizes]


def _gradients(out: torch.Tensor, lse: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    loss = (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    weights = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    return list(
        torch.autograd.grad(
            loss + torch.where(lse.isfinite(), lse, 0.0).double().mul(weights).sum(), of
        )
    )


def _plain(
    tensors: list[torch.Tensor], options: dict[str, Any], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The dense formula; in fp32 with results rounded to a shorter dtype."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    full_options = {"causal": False, "window": None, "scale": None, "softcap": 0.0} | options
    generator = [x.detach().to(wide).requires_grad_() for x in tensors]
    out, lse = reference(*generator, make_spec(generator[0].shape[-1], *full_options.values()))
    rounded = out + (out.to(dtype).to(wide) - out).detach()
    return [
        out.detach().to(dtype),
        lse.detach(),
        *(g.to(dtype) for g in _gradients(rounded, lse, generator)),
    ]


@pytest.mark.parametrize("case", select(CASES, DEFAULT))
def test_forward_and_backward_in_fp32(case: str) -> None:
    shape, options = CASES[case]
    tensors = _tensors(shape, torch.float32)
    out, lse = attention(*tensors, **options, return_lse=True)
    ours = [out, lse, *_gradients(out, lse, tensors)]
    blind = torch.isinf(lse)
    exact, plain = _plain(tensors, options, torch.float64), _plain(tensors, options, torch.float32)
    assert torch.equal(blind, torch.isinf(exact[1]))
    for results in (ours, exact, plain):
        results[1] = results[1].masked_fill(blind, 0.0)
    assert_close(NAMES, ours, exact, plain, floor=2e-6)
    assert kernels.explain()[-1]["backend"] == "own"


@pytest.mark.parametrize("dtype", select([torch.bfloat16, torch.float16]))
def test_short_types(dtype: torch.dtype) -> None:
    tensors = _tensors((1, 20, 35, 2, 1, 16, 16), dtype)
    options = {"causal": True}
    out, lse = attention(*tensors, **options, return_lse=True)
    ours = [out, lse, *_gradients(out, lse, tensors)]
    exact = [x.double() for x in _plain(tensors, options, torch.float64)]
    assert_close(
        NAMES, ours, exact, _plain(tensors, options, dtype), floor=2 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("options", select([{"window": 9, "softcap": 4.0}, {"causal": True}]))
def test_packed_sequences(options: dict[str, Any]) -> None:
    """Sequences without queries, keys or both; lengths on and off block boundaries."""
    spans = [(3, 3), (0, 4), (16, 17), (0, 0), (5, 0), (20, 33)]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor([s[i] for s in spans]).cumsum(0).tolist()]) for i in (0, 1)
    )
    sizes = ((int(cu_q[-1]), 2, 16), (int(cu_k[-1]), 1, 16), (int(cu_k[-1]), 1, 16))
    tensors = [nan_padded(*size, gap=4).requires_grad_() for size in sizes]
    out, lse = attention_varlen(*tensors, cu_q, cu_k, 20, 33, **options, return_lse=True)
    gradients = _gradients(out, lse, tensors)
    expected, their_lse = attention_varlen(
        *tensors, cu_q, cu_k, 20, 33, **options, return_lse=True, backend="math"
    )
    torch.testing.assert_close((out, lse), (expected, their_lse), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients, _gradients(expected, their_lse, tensors), rtol=1e-4, atol=1e-5
    )


def test_bounds_outside_the_tensors_are_clamped() -> None:
    """As in a captured graph, where bounds are not checked: no row outside is read or written."""
    q = nan_padded(12, 1, 16, gap=4)
    wild = torch.tensor([0, 7, 90], dtype=torch.int32)
    out, _ = launch.forward(
        q[None], q[None], q[None], Bounds(wild, wild, 12, 12), make_spec(16, True, None, None, 0.0)
    )
    held = torch.tensor([0, 7, 12])
    torch.testing.assert_close(out[0], attention_varlen(q, q, q, held, held, 7, 7, causal=True))


@pytest.mark.parametrize(
    ("shape", "options", "heads_first"),
    select(
        [
            ((1, 21, 37, 2, 1, 16, 16), {"causal": True}, False),
            ((2, 20, 32, 2, 2, 48, 32), {}, False),
            ((2, 20, 32, 4, 2, 16, 16), {"causal": True}, True),
        ]
    ),
)
def test_the_variant_for_sm_90(
    shape: tuple[int, ...], options: dict[str, Any], heads_first: bool
) -> None:
    b, q, k, h, h_kv, d, dv = shape
    tensors = [torch.randn(size) for size in ((b, q, h, d), (b, k, h_kv, d), (b, k, h_kv, dv))]
    if heads_first:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    spec = make_spec(d, *({"causal": False} | options).values(), None, None, 0.0)
    assert tma_why_not(*tensors, spec) is None
    with tuning.override("attention_forward", tma=True):
        out, lse = launch.forward(*tensors, None, spec)
    torch.testing.assert_close((out, lse), reference(*tensors, spec), rtol=1e-5, atol=1e-5)


def test_the_variant_rejects_rows_of_other_sequences() -> None:
    spec = make_spec(16, True, None, None, 0.0)
    q = torch.zeros(2, 20, 1, 16)
    assert "another sequence" in str(tma_why_not(q, q, q, spec))
    assert "window" in str(tma_why_not(q, q, q, make_spec(16, True, 4, None, 0.0)))
    assert "strides" in str(tma_why_not(*[torch.zeros(1, 20, 1, 18)[..., :16]] * 3, spec))


@pytest.mark.parametrize(
    "case", select(["window", "causal, more keys", "full, grouped, ragged ends"])
)
def test_backward_in_one_loop_gives_the_same_result(case: str) -> None:
    """As for wide heads: every block masked, instead of separate loops over masked and full
    blocks.
    """
    shape, options = CASES[case]
    tensors = _tensors(shape, torch.float32)
    out, lse = attention(*tensors, **options, return_lse=True)
    apart = _gradients(out, lse, tensors)
    out, lse = attention(*tensors, **options, return_lse=True)
    with (
        tuning.override("attention_keys_values", one_loop=True),
        tuning.override("attention_queries", one_loop=True),
    ):
        torch.testing.assert_close(_gradients(out, lse, tensors), apart, rtol=1e-5, atol=1e-6)


def test_results_are_bitwise_reproducible() -> None:
    tensors = _tensors((1, 35, 35, 2, 1, 16, 16), torch.float32)
    once, again = (
        _gradients(*attention(*tensors, causal=True, return_lse=True), tensors) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
