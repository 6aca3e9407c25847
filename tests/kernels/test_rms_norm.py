"""rms_norm's reference against fp64 autograd and torch, bad arguments, and the choice on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import BackendUnavailable, dispatch, explain, rms_norm
from kernels.norm import reference

X, W = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)


def test_the_reference_matches_torch_and_its_gradient() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    torch.testing.assert_close(
        reference.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    )
    assert torch.autograd.gradcheck(lambda a, b: reference.rms_norm(a, b, 1e-6), (x, w))


def test_quantized_output_decodes_to_the_norm() -> None:
    x, w, r = torch.randn(2, 3, 300), torch.randn(300), torch.randn(2, 3, 300)
    for quant, groups, width in (("row", 1, 300), ("1x128", 3, 128)):
        out: Any = rms_norm(x, w, residual=r, quant=quant)
        q, scale, h = out
        assert q.dtype == torch.float8_e4m3fn and scale.shape == (2, 3, groups)
        torch.testing.assert_close(h, x + r)
        expected = reference.rms_norm(h, w, 1e-6)
        back = q.float() * scale.repeat_interleave(width, -1)[..., :300]
        # 3 bits of mantissa
        assert ((back - expected).abs() <= expected.abs() / 16 + scale.max() * 2**-9).all()


def test_a_cpu_uses_torch_and_records_it() -> None:
    dispatch.clear_records()
    x, w = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(rms_norm(x, w), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))
    (record,) = explain()
    assert record["backend"] == "torch" and "CPU" in str(record["reason"]) and record["calls"] == 1
    rms_norm(x, w)
    assert explain()[0]["calls"] == 2
    rms_norm(x, w, 1.0)
    with pytest.raises(TypeError, match="eps must be a number"):
        rms_norm(x, w, True)
    with pytest.raises(TypeError, match="w has layout"):
        rms_norm(x, w.to_sparse())


def test_a_forced_backend_runs_or_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(BackendUnavailable, match=r"own was requested.*CPU"):
        rms_norm(x, w, backend="own")
    monkeypatch.setenv("KERNELS_BACKEND", "rms_norm=reference")
    dispatch.clear_records()
    rms_norm(x, w)
    assert explain()[0]["backend"] == "reference"
    monkeypatch.setenv("KERNELS_BACKEND", "flash")  # for operations that have it
    rms_norm(x, w)
    monkeypatch.setenv("KERNELS_BACKEND", "rms_norm=flash")
    with pytest.raises(ValueError, match="available backends: own, torch, reference"):
        rms_norm(x, w)
    monkeypatch.setenv("KERNELS_BACKEND", "fastest")
    with pytest.raises(ValueError, match="fastest"):
        rms_norm(x, w)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor"),
        ({"x": torch.ones(2, 8, dtype=torch.int32)}, TypeError, "x is int32"),
        ({"x": torch.ones(2, 0), "w": torch.ones(0)}, ValueError, "must not be empty"),
        ({"x": torch.tensor(1.0)}, ValueError, "scalar"),
        ({"w": torch.ones(7)}, ValueError, r"w has shape \(7,\); it must be \(8\)"),
        ({"w": torch.ones(8, device="meta")}, ValueError, "w is on meta"),
        ({"residual": torch.ones(8)}, ValueError, "residual has shape"),
        ({"residual": torch.ones(2, 8).half()}, TypeError, "Cast one"),
        ({"eps": 0.0}, ValueError, "eps is 0.0"),
        ({"quant": "int4"}, ValueError, "quant is 'int4'"),
        ({"w": torch.ones(8, requires_grad=True), "quant": "row"}, ValueError, "no_grad"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"x": torch.ones(2, 8), "w": torch.ones(8)}
    rms_norm(**good)
    with pytest.raises(error, match=message):
        rms_norm(**{**good, **change})
