"""Norm, rotation and low-rank products in fewer passes: torch's values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from workers.models.adapters import low_rank
from workers.models.adapters.nf4 import quantize_nf4
from workers.models.layers.cpu_operations import frozen_rms_norm, is_plain_cpu, rotate
from workers.models.layers.rope import apply_rope


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, drawn(*out.shape, seed=9).to(out.dtype))


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_frozen_norm_equals_torch(rows: int) -> None:
    x = drawn(2, rows, 576).requires_grad_()
    weight = drawn(576, seed=1)
    out, expected = frozen_rms_norm(x, weight, 1e-5), functional.rms_norm(x, (576,), weight, 1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(out, x), gradients(expected, x), rtol=1e-10, atol=1e-12)


def test_rotation_equals_apply_rope_to_the_bit() -> None:
    x = drawn(2, 5, 3, 8).float().requires_grad_()
    angle = drawn(5, 4, seed=1).float()
    tables = angle.cos(), angle.sin()
    out, expected = rotate(x, *tables), apply_rope(x, *tables, False)
    assert torch.equal(out, expected)
    assert torch.equal(gradients(out, x)[0], gradients(expected, x)[0])


@pytest.mark.parametrize("quantized", [False, True])
def test_a_low_rank_product_equals_separate_operators(quantized: bool) -> None:
    x = drawn(2, 5, 128).float().requires_grad_()
    a, b = drawn(4, 128, seed=1).float(), drawn(96, 4, seed=2).float()
    for each in (a, b):
        each.requires_grad_()
    dense = drawn(96, 128, seed=3).float()
    weight = quantize_nf4(dense, double=True) if quantized else dense
    dense = dense if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    assert low_rank.applies(x, weight, a, b)
    out = low_rank.low_rank_linear(x, weight, a, b, 0.5)
    expected = x @ dense.T + (x @ a.T) @ b.T * 0.5
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    inputs = (x, a, b)
    torch.testing.assert_close(
        gradients(out, *inputs), gradients(expected, *inputs), rtol=1e-4, atol=1e-4
    )


def test_other_tensors_and_modes_keep_torchs_operators() -> None:
    x, weight = torch.zeros(1, 4), torch.zeros(4, 4)
    a, b = torch.zeros(2, 4), torch.zeros(4, 2)
    assert is_plain_cpu(x) and low_rank.applies(x, weight, a, b)
    assert not is_plain_cpu(x.bfloat16())
    assert not low_rank.applies(x, weight.requires_grad_(), a, b), "W is trained"
    assert not low_rank.applies(x, torch.zeros(4, 4), a.bfloat16(), b.bfloat16())

    weight = torch.zeros(4, 4)
    with TorchDispatchMode():  # such as the one of selective recomputation
        assert not is_plain_cpu(x) and not low_rank.applies(x, weight, a, b)
