"""Every way to a block's attention on this machine against autograd through the plain formula."""

from __future__ import annotations

import pytest
import torch

from workers.models.layers import block_attention
from workers.models.layers.block_attention import block_backward, block_forward

# heads, key-value heads, queries, keys, head dim of queries, of values
SHAPES = [(4, 4, 7, 7, 8, 8), (4, 2, 5, 9, 8, 8), (4, 1, 9, 3, 12, 8), (3, 3, 6, 6, 8, 12)]


def plain(q, k, v, seen, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("kernel", ["cpu", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_forward_and_backward(monkeypatch, shape, kind, kernel, dtype):
    heads, shared, queries, keys, width, value_width = shape
    if kind == "causal" and queries != keys:
        keys = queries
    monkeypatch.setattr(block_attention, "_kernel", lambda *_: kernel)
    torch.manual_seed(0)
    q, k = torch.randn(2, heads, queries, width), torch.randn(2, shared, keys, width)
    v, grad = torch.randn(2, shared, keys, value_width), torch.randn(2, heads, queries, value_width)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if kind != "full":
        seen = seen.tril()
    options = {
        "causal": kind == "causal",
        "seen_QK": seen if kind == "masked" else None,
        "scale": 0.4,
    }
    wanted = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = plain(*wanted, seen, 0.4)
    out.backward(grad.double())
    result, result_lse = block_forward(q, k, v, **options)
    gradients = block_backward(grad, q, k, v, result, result_lse, **options)
    near = {"rtol": 2e-6, "atol": 2e-6}  # fp16 operands too are multiplied in fp32
    torch.testing.assert_close(result.double(), out.detach(), **near)
    torch.testing.assert_close(result_lse.double(), lse.detach(), **near)
    for mine, leaf in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), leaf.grad, **near)
