"""Cross-entropy in place in the memory of the logits equals torch's up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from workers.training.numerics import cross_entropy as module
from workers.training.numerics.cross_entropy import cross_entropy
from workers.training.parallel.batch_sharding import IGNORED


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 2), (37, 517)])
def test_losses_and_gradients_equal_torchs(tokens, vocab, monkeypatch):
    monkeypatch.setitem(
        module._CHUNK_BYTES, "cpu", 4 * vocab * 5
    )  # chunks of 5 rows and a remainder
    hidden = torch.randn(tokens, 8, dtype=torch.float32, requires_grad=True)
    head = torch.randn(vocab, 8, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    targets[1::3] = IGNORED
    weights = torch.randn(tokens)
    expected_losses = functional.cross_entropy(
        4 * hidden @ head.T, targets, ignore_index=IGNORED, reduction="none"
    )
    expected_grads = torch.autograd.grad((expected_losses * weights).sum(), (hidden, head))
    logits = 4 * hidden @ head.T
    losses = cross_entropy(logits, targets, ignored=IGNORED)
    total = (losses * weights).sum()
    grads = torch.autograd.grad(total, (hidden, head), retain_graph=True)
    assert torch.allclose(losses, expected_losses, rtol=1e-6, atol=1e-6)
    for actual, expected in zip(grads, expected_grads, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        # the first backward pass overwrote the softmax: an error, not a wrong gradient
        torch.autograd.grad(total, (hidden, head))


def test_without_a_backward_pass_the_logits_do_not_change():
    logits, targets = torch.randn(9, 33), torch.randint(33, (9,))
    before = logits.clone()
    with torch.no_grad():
        losses = cross_entropy(logits, targets, ignored=IGNORED)
    assert torch.allclose(
        losses, functional.cross_entropy(logits, targets, reduction="none"), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(logits, before)
