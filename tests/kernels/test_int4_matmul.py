"""Four-bit weights on a CPU: rounding, packing, files of AWQ and GPTQ, products, and bad
arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, explain, int4_matmul, pack_awq
from kernels.int4 import from_awq, from_gptq, unpack
from kernels.int4.pack import dequantize, pack_codes


@pytest.mark.parametrize(("k", "group"), [(300, 128), (576, 64), (208, 16), (600, 256)])
def test_packed_numbers_are_within_half_a_step(k: int, group: int) -> None:
    w = torch.randn(24, k)
    w[3] = 0.0
    w[4] = w[4].abs() + 5
    qweight, scales, zeros = pack_awq(w, group)
    assert qweight.shape == (-(-k // 128) * 16, 24) and scales.shape == zeros.shape == (
        -(-k // group),
        24,
    )
    back = dequantize(qweight, scales, zeros, group, k, torch.float32).T
    # the zero is rounded too: up to a step at the range's ends
    assert ((back - w).abs() <= scales.T.repeat_interleave(group, 1)[:, :k] * 1.01).all()
    assert (back - w).abs().mean() < 0.3 * scales.mean() and not back[3].any()


def test_codes_unpack_to_themselves() -> None:
    codes = torch.randint(0, 16, (200, 9), dtype=torch.uint8)
    assert torch.equal(unpack(pack_codes(codes), 200), codes)


def test_awq_and_gptq_files_convert_to_the_same_weights() -> None:
    codes, zeros = torch.randint(0, 16, (256, 16)), torch.randint(1, 16, (2, 16))
    scales = torch.rand(2, 16)
    shifts = torch.arange(0, 32, 4)

    def joined(x: torch.Tensor) -> torch.Tensor:  # eight numbers of the last dim in one int32
        return (x.to(torch.int64) << shifts).sum(-1).to(torch.int32)

    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    awq = from_awq(*(joined(x.view(-1, 2, 8)[..., order]) for x in (codes, zeros)), scales)
    gptq = from_gptq(
        joined(codes.view(32, 8, 16).transpose(1, 2)), joined((zeros - 1).view(2, 2, 8)), scales
    )
    expected = (codes - zeros.repeat_interleave(128, 0)) * scales.repeat_interleave(128, 0)
    for packed in (awq, gptq):
        torch.testing.assert_close(dequantize(*packed, 128, 256, torch.float32), expected)
    with pytest.raises(ValueError, match="a zero of 16"):
        from_gptq(torch.zeros(32, 16).int(), torch.full((2, 2), -1).int(), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_match_the_dequantized_weight(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 3, 300).to(dtype), torch.randn(20, 300).to(dtype)
    w[5] = 0.0
    options = pack_awq(w, 64)
    assert options[1].dtype == dtype and (options[1] > 0).all()
    assert not dequantize(*options, 64, 300, torch.float32)[:, 5].any()
    dispatch.clear_records()
    got = int4_matmul(x, *options, 64)
    expected = x.double() @ dequantize(*options, 64, 300, torch.float64)
    torch.testing.assert_close(
        got.double(), expected, rtol=2e-2, atol={torch.float32: 1e-4}.get(dtype, 0.3)
    )
    (record,) = explain()
    assert record["backend"] == "torch" and "CPU" in str(record["reason"])
    assert (expected - x.double() @ w.double().T).norm() / expected.norm() < 0.15


W = torch.randn(8, 256)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.randn(2, 100)}, ValueError, "qweight has shape"),
        ({"x": torch.arange(256).view(1, 256)}, TypeError, "x is int64"),
        ({"group": 64}, ValueError, "scales has shape"),
        ({"group": 96}, ValueError, "group is 96"),
        ({"zeros": torch.zeros(2, 8)}, TypeError, "zeros is float32"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    qweight, scales, zeros = pack_awq(W, 128)
    good: dict[str, Any] = {
        "x": torch.randn(2, 256),
        "qweight": qweight,
        "scales": scales,
        "zeros": zeros,
        "group": 128,
    }
    assert int4_matmul(**good).shape == (2, 8)
    with pytest.raises(error, match=message):
        int4_matmul(**{**good, **changes})


def test_unpackable_weights_are_rejected() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        pack_awq(torch.full((2, 128), float("nan")))
    with pytest.raises(ValueError, match="together"):
        pack_awq(W, scales=torch.ones(2, 8))
    with pytest.raises(ValueError, match="group is 100"):
        pack_awq(W, 100)
