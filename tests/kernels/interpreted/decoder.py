"""The engine's decoder and update by own kernels, as on a GPU: against the formulas as they are written."""

from __future__ import annotations

import pytest
import torch

from kernels import explain
from tests.workers.models.block_shapes import built, gradients
from workers.contracts.plan import ParallelPlan
from workers.models.documents import Documents
from workers.models.operations import make_plain
from workers.training.objectives import without_logits
from workers.training.optim.update import fused_adamw, update

CPU = torch.device("cpu")
SMALL = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 19}
TOKENS = torch.arange(14)[None] % 19


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_own_kernels_run_in_a_decoder(name: str) -> None:
    chosen, plain = built(name, **SMALL), built(name, **SMALL)
    make_plain(plain)
    documents = Documents([[0, 3]], TOKENS.shape[1], CPU) if name == "llama" else None
    ours, theirs = gradients(chosen, documents, TOKENS), gradients(plain, documents, TOKENS)
    for each, found in ours.items():
        torch.testing.assert_close(found, theirs[each], rtol=1e-4, atol=1e-5, msg=lambda says, at=each: f"{at}: {says}")
    ran = {str(row["op"]): row["backend"] for row in explain()}
    attention = "attention_varlen" if documents else "attention"
    assert ran[attention] == "own" and set(ran.values()) == {"own"} and len(ran) >= 2


def test_losses_and_update_take_own_kernels() -> None:
    decoder, plain = (built("gpt-2", **SMALL | {"kv_heads": 2}) for _ in range(2))
    assert without_logits(ParallelPlan(), CPU) and not without_logits(ParallelPlan(tp=2), CPU)
    decoder(TOKENS, None, TOKENS.roll(-1, 1)).backward()
    gradients(plain, None, TOKENS)
    for one, other in zip(decoder.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
        one.grad = other.grad  # an update by its sign alone, as AdamW's first, makes much of a gradient's last digit
    kind = fused_adamw(decoder.parameters())
    assert kind is not None
    ours = kind(decoder.parameters(), lr=0.01)  # type: ignore[call-arg]
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for model, optimizer in ((decoder, ours), (plain, theirs)):
        given = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        update(optimizer, given, norm=8.0, limit=1.0, scale=1.0)
    for one, other in zip(decoder.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    ran = {(row["op"], row["backend"]) for row in explain()}
    assert {("linear_cross_entropy", "own"), ("cross_entropy", "own"), ("adamw", "own")} <= ran
