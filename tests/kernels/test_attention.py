"""Attention without a GPU: every path against the dense formula in float64, bad arguments, choices
and reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import attention, attention_varlen
from kernels.attention.reference import reference
from kernels.attention.spec import make_spec
from kernels.dispatch import clear_records

SHAPES = {  # batch, queries, keys, heads, key-value heads, D, D_v
    "square": (2, 37, 37, 4, 4, 16, 16),
    "grouped, keys before the queries": (1, 70, 101, 6, 2, 24, 24),
    "queries that see nothing": (1, 90, 33, 4, 1, 16, 16),
    "latent": (2, 65, 65, 2, 2, 48, 32),
    "values wider": (1, 20, 20, 2, 2, 16, 40),
    "one query": (2, 1, 50, 4, 2, 16, 16),
    "no keys": (1, 5, 0, 2, 2, 16, 16),
    "no queries": (1, 0, 5, 2, 2, 16, 16),
    "blocks": (1, 300, 700, 1, 1, 16, 16),
}
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 11},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0, "causal": True, "scale": 0.7},
    "all": {"window": 40, "softcap": 5.0, "scale": 0.3},
}


@pytest.fixture(autouse=True)
def _no_records() -> Iterator[None]:
    clear_records()
    yield
    clear_records()


def _tensors(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[torch.Tensor]:
    b, q, k, h, h_kv, d, dv = shape
    inputs = torch.Generator().manual_seed(seed)
    sizes = ((b, q, h, d), (b, k, h_kv, d), (b, k, h_kv, dv))
    return [
        torch.randn(s, generator=inputs, dtype=torch.float64).to(dtype).requires_grad_()
        for s in sizes
    ]


def _truth(
    tensors: list[torch.Tensor], options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output, log-sum-exp and gradients of the dense formula in float64 under autograd."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    full_options = {"causal": False, "window": None, "scale": None, "softcap": 0.0} | options
    out, lse = reference(*wide, make_spec(tensors[0].shape[-1], *full_options.values()))
    return [out, lse], _gradients(out, lse, wide)


def _gradients(
    out: torch.Tensor, lse: torch.Tensor | None, of: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of a weighted sum over the output and over the finite log-sum-exps."""
    inputs = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=inputs, dtype=torch.float64).to(out.dtype)).sum()
    if lse is not None:
        weights = torch.randn(lse.shape, generator=inputs, dtype=torch.float64).to(lse.dtype)
        loss = loss.double() + torch.where(lse.isfinite(), lse, 0.0).mul(weights).sum()
    return list(torch.autograd.grad(loss, of))


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_path_matches_the_formula_and_its_gradient(
    shape: str, spec: str, backend: str
) -> None:
    options = FORMS[spec]
    if backend == "flash" and "softcap" in options:
        with pytest.raises(kernels.BackendUnavailable, match="not support a softcap"):
            attention(*_tensors(SHAPES[shape]), **options, backend=backend)
        return
    tensors = _tensors(SHAPES[shape])
    (out, lse), gradients = _truth(tensors, options)
    ours, our_lse = attention(*tensors, **options, return_lse=True, backend=backend)
    torch.testing.assert_close(ours, out.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(our_lse, lse.detach(), rtol=1e-10, atol=1e-10)
    for ours_, true in zip(_gradients(ours, our_lse, tensors), gradients, strict=True):
        torch.testing.assert_close(ours_, true, rtol=1e-9, atol=1e-9)
    alone = attention(*tensors, **options, backend=backend)  # may use torch's SDPA
    torch.testing.assert_close(alone, out.detach(), rtol=1e-10, atol=1e-10)


def test_gradients_match_finite_differences() -> None:
    tensors = _tensors((1, 5, 7, 2, 1, 16, 16))
    for backend, options in (("flash", {"causal": True}), ("math", {"window": 3, "softcap": 3.0})):
        assert torch.autograd.gradcheck(
            lambda *x, o=options, b=backend: attention(*x, **o, return_lse=True, backend=b),
            tensors,
            fast_mode=True,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("backend", "options"), [("flash", {"window": 30}), ("math", {"softcap": 4.0, "causal": True})]
)
def test_short_types_lose_no_more_than_torch_does(
    dtype: torch.dtype, backend: str, options: dict[str, Any]
) -> None:
    tensors = _tensors((1, 150, 170, 4, 2, 32, 32), dtype)
    (out, _), gradients = _truth(tensors, options)
    ours = attention(*tensors, **options, backend=backend)
    # torch: dense, rounded to the dtype after each step
    plain = [x.detach().float().requires_grad_() for x in tensors]
    full_options = {"causal": False, "window": None, "scale": None, "softcap": 0.0} | options
    spec = make_spec(32, *full_options.values())
    theirs = reference(*plain, spec)[0].to(dtype)
    actual = [ours, *_gradients(ours, None, tensors)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    true = [out, *_gradients(reference(*wide, spec)[0], None, wide)]
    rounded = [theirs, *(g.to(dtype) for g in _gradients(theirs.float(), None, plain))]
    assert gradients
    for ours_, theirs_, true_ in zip(actual, rounded, true, strict=True):
        lost, allowed = (ours_.double() - true_).abs().max(), (theirs_.double() - true_).abs().max()
        assert ours_.dtype == dtype
        assert lost <= 4 * allowed + 4 * torch.finfo(dtype).eps * true_.abs().max()


def test_packed_sequences_are_independent() -> None:
    lengths_q, lengths_k = [3, 0, 20, 1, 7], [3, 4, 20, 30, 0]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()]) for x in (lengths_q, lengths_k)
    )
    inputs = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(n, h, 16, generator=inputs, dtype=torch.float64)
        for n, h in ((31, 4), (57, 2), (57, 2))
    )
    tensors = [x.requires_grad_() for x in (q, k, v)]
    for options in ({"causal": True}, {"window": 4}, {"softcap": 3.0}):
        out, lse = attention_varlen(*tensors, cu_q, cu_k, 20, 30, **options, return_lse=True)
        gradients = _gradients(out, lse, tensors)
        parts = [
            attention(
                *(
                    x[None, a:b]
                    for x, (a, b) in zip(tensors, ((i, j), (m, n), (m, n)), strict=True)
                ),
                **options,
                return_lse=True,
                backend="reference",
            )
            for i, j, m, n in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        ]
        expected, expected_lse = (
            torch.cat([p[0][0] for p in parts]),
            torch.cat([p[1][0] for p in parts], 1),
        )
        torch.testing.assert_close((out, lse), (expected.detach(), expected_lse.detach()))
        torch.testing.assert_close(gradients, _gradients(expected, expected_lse, tensors))


def test_odd_strides_and_noncontiguous_last_dims() -> None:
    tensors = _tensors((2, 40, 40, 4, 4, 16, 16), torch.float32)
    heads_first = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    apart = [x.detach().repeat_interleave(2, dim=-1)[..., ::2] for x in tensors]
    for options in ({"causal": True}, {"window": 9}, {"softcap": 3.0}):
        plain = attention(*tensors, **options)
        for odd in (heads_first, apart):
            torch.testing.assert_close(attention(*odd, **options), plain.detach())


@pytest.mark.parametrize(
    "options", [{"window": 64}, {"causal": True}, {"softcap": 20.0, "window": 64}]
)
def test_memory_grows_linearly_with_the_length(options: dict[str, Any]) -> None:
    """The largest tensor of forward and backward at four times the length: about four times as
    large, never sixteen.
    """
    peaks = []
    for length in (512, 2048):
        tensors = _tensors((1, length, length + 64, 1, 1, 16, 16), torch.float32)
        with _Peak() as peak:
            attention(*tensors, **options).sum().backward()
        peaks.append(peak.bytes)
    assert peaks[1] < 6 * peaks[0]


class _Peak(TorchDispatchMode):
    """The largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def _record() -> dict[str, object]:
    (record,) = kernels.explain()
    return record


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({"causal": True}, "flash", "not own: a CPU tensor"),
        ({"window": 5}, "flash", "not own: a CPU tensor"),
        ({"softcap": 5.0}, "math", "does not support a softcap"),
        ({"causal": True, "backend": "math"}, "math", "requested by backend=math"),
    ],
)
def test_the_choice_is_recorded_with_its_reason(
    options: dict[str, Any], backend: str, reason: str
) -> None:
    tensors = _tensors((1, 8, 8, 2, 2, 16, 16), torch.float32)
    for _ in range(3):
        attention(*tensors, **options)
    record = _record()
    assert (record["op"], record["backend"], record["calls"]) == ("attention", backend, 3)
    assert reason in str(record["reason"])


def test_the_environment_forces_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors((1, 8, 8, 2, 2, 16, 16), torch.float32)
    monkeypatch.setenv("KERNELS_BACKEND", "attention=reference")
    attention(*tensors, causal=True)
    assert _record()["backend"] == "reference"
    monkeypatch.setenv("KERNELS_BACKEND", "attention=cudnn")
    with pytest.raises((kernels.BackendUnavailable, ValueError), match="cudnn"):
        attention(*tensors)


def test_a_cached_call_behaves_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (x.detach() for x in _tensors((1, 8, 8, 2, 2, 16, 16), torch.float32))
    first, again = (attention(q, k, v, causal=True, scale=1.0) for _ in range(2))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert _record()["calls"] == 2
    for bad, error in (
        ({"causal": 1}, TypeError),
        ({"scale": True}, TypeError),
        ({"softcap": -1.0}, ValueError),
    ):
        with pytest.raises(error):
            attention(q, k, v, **{"causal": True, "scale": 1.0, **bad})
    for other in (k.double(), k.to("meta"), k.to_sparse(), k[:, :, :, :8], None):
        with pytest.raises((TypeError, ValueError)):
            attention(q, other, v, causal=True, scale=1.0)  # type: ignore[arg-type]
    apart = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in (q, k, v)]
    torch.testing.assert_close(attention(*apart, causal=True, scale=1.0), first)
    assert attention(q, k, v, scale=1.0, return_lse=True)[1].shape == (1, 2, 8)
    monkeypatch.setenv("KERNELS_BACKEND", "attention=reference")
    clear_records()
    attention(q, k, v, causal=True, scale=1.0)
    assert _record()["backend"] == "reference"


def _bad(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options: dict[str, Any] = {
        "q": torch.zeros(1, 4, 4, 16),
        "k": torch.zeros(1, 6, 2, 16),
        "v": torch.zeros(1, 6, 2, 16),
    }
    options.update(changes)
    return (options.pop("q"), options.pop("k"), options.pop("v")), options


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(4, 4, 16)}, ValueError, "q has 3 dimensions"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
        ({"q": torch.zeros(1, 4, 4, 16, dtype=torch.int32)}, TypeError, "q is int32"),
        ({"k": torch.zeros(1, 6, 2, 16, dtype=torch.float16)}, TypeError, "k is torch.float16"),
        ({"k": torch.zeros(1, 6, 2, 16, device="meta")}, ValueError, "k is on meta"),
        ({"k": torch.zeros(1, 5, 2, 16)}, ValueError, "all but the last must be equal"),
        ({"k": torch.zeros(1, 6, 2, 8)}, ValueError, "head dim 16 and k 8"),
        ({"k": torch.zeros(2, 6, 2, 16), "v": torch.zeros(2, 6, 2, 16)}, ValueError, "batch of 2"),
        (
            {"k": torch.zeros(1, 6, 3, 16), "v": torch.zeros(1, 6, 3, 16)},
            ValueError,
            "must be a multiple",
        ),
        ({"window": 0}, ValueError, "at least 1"),
        ({"window": 2.0}, TypeError, "integer number of keys"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"scale": 0.0}, ValueError, "scale is 0.0"),
        ({"scale": float("inf")}, ValueError, "scale is inf"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"backend": "fast"}, ValueError, "fast"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    tensors, options = _bad(**changes)
    with pytest.raises(error, match=message):
        attention(*tensors, **options)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "longest", "error", "message"),
    [
        ([0, 4, 8], [0, 9], (8, 9), ValueError, "2 sequences and cu_k 1"),
        ([1, 4, 8], [0, 4, 9], (8, 9), ValueError, "cu_q must start at 0"),
        ([0, 9, 8], [0, 4, 9], (9, 9), ValueError, "not decrease"),
        ([0, 4, 7], [0, 4, 9], (8, 9), ValueError, "ends at 7, and the tensor has 8 rows"),
        (
            [0, 2, 8],
            [0, 4, 9],
            (5, 9),
            ValueError,
            "max_q is 5, and a sequence of cu_q has length 6",
        ),
        ([0, 2, 8], [0, 4, 9], (8.0, 9), TypeError, "max_q must be an integer"),
        ([0.0, 2.0, 8.0], [0, 4, 9], (8, 9), TypeError, "cu_q is float"),
    ],
)
def test_bad_bounds_are_rejected(
    cu_q: list[Any], cu_k: list[Any], longest: tuple[Any, Any], error: type[Exception], message: str
) -> None:
    q, k = torch.zeros(8, 2, 16), torch.zeros(9, 2, 16)
    with pytest.raises(error, match=message):
        attention_varlen(q, k, k, torch.tensor(cu_q), torch.tensor(cu_k), *longest)


def test_changed_bounds_are_checked_again() -> None:
    q, cu = torch.zeros(8, 2, 16), torch.tensor([0, 4, 8], dtype=torch.int32)
    attention_varlen(q, q, q, cu, cu, 4, 4)
    cu[1] = 6
    with pytest.raises(ValueError, match="has length 6"):
        attention_varlen(q, q, q, cu, cu, 4, 4)
