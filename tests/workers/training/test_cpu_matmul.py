"""oneDNN matrix products compared with fp64, for all layouts of a linear layer's passes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from workers.training.numerics import cpu_matmul


@pytest.fixture
def onednn(monkeypatch):
    """For every product, on any CPU; as a process has it that trains on one where it
    pays.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(cpu_matmul, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(cpu_matmul, "onednn_pays", lambda operator: True)
    cpu_matmul.prefer_onednn()


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_its_gradients(onednn, bias):
    x, weight, added = torch.randn(3, 7, 19), torch.randn(23, 19), torch.randn(23) if bias else None
    result = []
    for dtype in (torch.float32, torch.float64):
        leaves = [
            each.detach().to(dtype).requires_grad_()
            for each in (x, weight, added)
            if each is not None
        ]
        out = functional.linear(*leaves)
        out.square().sum().backward()
        result.append([out, *(leaf.grad for leaf in leaves)])
        assert all(each.is_contiguous() for each in result[-1]), (
            "gradients that optimizers walk through fast"
        )
    for ours, exact in zip(*result, strict=True):
        assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(4, 40), (40, 4), (9, 9)])
def test_a_transposed_left_matrix_is_copied_only_if_it_is_smaller(
    onednn, monkeypatch, rows, columns
):
    """As in gradients of low-rank factors; oneDNN would copy a left one that is not row-major."""
    went, product = [], cpu_matmul._linear
    monkeypatch.setattr(
        cpu_matmul, "_linear", lambda *given: went.append(given[0]) or product(*given)
    )
    left, right = torch.randn(8, rows).t(), torch.randn(8, columns)
    out = cpu_matmul._product(left, right, None)
    assert torch.allclose(out.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()
    [first] = went
    assert tuple(first.shape) == ((columns, 8) if rows > columns else (rows, 8))
    assert first.is_contiguous() == (rows <= columns)


def test_pieces_of_wider_matrices_are_left_as_they_are(onednn, monkeypatch):
    """As fp8 tiles of ragged widths are: oneDNN has only its slow reference for them."""
    went = []
    monkeypatch.setattr(cpu_matmul, "_linear", lambda *given: went.append(given))
    x, wide = torch.randn(7, 32)[:, :19], torch.randn(23, 32)[:, :19]
    for left, right in (
        (x, wide.t()),
        (x.contiguous(), wide.t()),
        (x.t(), torch.randn(7, 5)),
        (wide, torch.randn(19, 4)),
    ):
        assert torch.allclose(
            (left @ right).double(), left.double() @ right.double(), rtol=1e-5, atol=1e-5
        )
    assert not went


def test_what_is_no_fp32_product_is_left_as_it_is(onednn):
    left, right = torch.randint(9, (4, 6)), torch.randint(9, (6, 5))
    assert torch.equal((left @ right).double(), left.double() @ right.double())
    assert (left.bfloat16() @ right.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(torch.zeros(0, 3) @ torch.ones(3, 2), torch.zeros(0, 2))
    assert torch.equal(torch.zeros(2, 0) @ torch.ones(0, 3), torch.zeros(2, 3))
    scaled = torch.addmm(torch.ones(5), left.float(), right.float(), beta=2, alpha=0.5)
    assert torch.allclose(scaled, 2 + 0.5 * (left @ right).float())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
