"""Cross-entropy in the logits' own memory, beside torch's: equal to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from workers.training.numerics import cross_entropy as module
from workers.training.numerics.cross_entropy import cross_entropy
from workers.training.parallel.batch_sharding import IGNORED


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 2), (37, 517)])
def test_losses_and_gradients_are_torchs(tokens, vocab, monkeypatch):
    monkeypatch.setitem(module._CHUNK_BYTES, "cpu", 4 * vocab * 5)  # chunks of 5 rows, and a rest
    hidden = torch.randn(tokens, 8, dtype=torch.float32, requires_grad=True)
    head = torch.randn(vocab, 8, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    targets[1::3] = IGNORED
    weights = torch.randn(tokens)
    want = functional.cross_entropy(
        4 * hidden @ head.T, targets, ignore_index=IGNORED, reduction="none"
    )
    want_grads = torch.autograd.grad((want * weights).sum(), (hidden, head))
    logits = 4 * hidden @ head.T
    found = cross_entropy(logits, targets, ignored=IGNORED)
    total = (found * weights).sum()
    grads = torch.autograd.grad(total, (hidden, head), retain_graph=True)
    assert torch.allclose(found, want, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(grads, want_grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        # the softmax is used up: an error, never a wrong gradient
        torch.autograd.grad(total, (hidden, head))


def test_without_a_backward_pass_the_logits_stay():
    logits, targets = torch.randn(9, 33), torch.randint(33, (9,))
    before = logits.clone()
    with torch.no_grad():
        found = cross_entropy(logits, targets, ignored=IGNORED)
    assert torch.allclose(
        found, functional.cross_entropy(logits, targets, reduction="none"), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(logits, before)
