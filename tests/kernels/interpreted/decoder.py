"""The engine's decoder and update with own kernels, as on a GPU, against plain formulas."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from kernels import dispatch, explain
from kernels.attention.triton_kernels import launch
from tests.matrix import select
from tests.workers.models.block_shapes import built, gradients
from workers.contracts.specs.plan import ParallelPlan
from workers.models.layers.documents import Documents
from workers.models.layers.operations import make_plain
from workers.models.moe.layer import RoutedMlp
from workers.training.fp8 import apply_fp8
from workers.training.objectives.token_losses import uses_hidden_states
from workers.training.optim.update import fused_adamw, update
from workers.training.recompute import apply_recompute
from workers.training.recompute.apply import recomputed_blocks
from workers.training.recompute.auto import RetainedOutputs, set_retained
from workers.training.recompute.operators import Probe

CPU = torch.device("cpu")
SMALL = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 19}
TOKENS = torch.arange(14)[None] % 19


@pytest.mark.parametrize("name", select(["llama", "latent"]))
def test_own_kernels_run_in_a_decoder(name: str) -> None:
    chosen, plain = built(name, **SMALL), built(name, **SMALL)
    make_plain(plain)
    documents = Documents([[0, 3]], TOKENS.shape[1], CPU) if name == "llama" else None
    ours, theirs = gradients(chosen, documents, TOKENS), gradients(plain, documents, TOKENS)
    for item, gradient in ours.items():
        torch.testing.assert_close(
            gradient,
            theirs[item],
            rtol=1e-4,
            atol=1e-5,
            msg=lambda message, at=item: f"{at}: {message}",
        )
    ran = {str(row["op"]): row["backend"] for row in explain()}
    attention = "attention_varlen" if documents else "attention"
    assert ran[attention] == "own" and set(ran.values()) == {"own"} and len(ran) >= 2


def test_experts_use_own_kernels_that_recomputation_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups, a bias, capacity and an auxiliary loss; then recomputation reuses the own kernels'
    results.
    """
    moe = {
        "experts": 6,
        "top_k": 2,
        "expert_ffn": 8,
        "scoring": "sigmoid",
        "groups": 3,
        "groups_per_token": 2,
        "bias_update": 0.1,
        "capacity": 1.0,
        "aux_loss": 0.1,
    }
    tokens = TOKENS[:, :9]
    decoder, plain = (built("window, experts", **SMALL, moe=moe, bias="all") for _ in range(2))
    for item in (decoder, plain):
        layer = item.blocks["0"].mlp
        assert isinstance(layer, RoutedMlp) and layer.router.choice_bias is not None
        layer.router.choice_bias.copy_(torch.linspace(0, 0.3, 6))
        layer.balance.gradient_scale = 0.5
    make_plain(plain)
    ours, theirs = gradients(decoder, None, tokens), gradients(plain, None, tokens)
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient,
            theirs[name],
            rtol=1e-4,
            atol=1e-5,
            msg=lambda message, at=name: f"{at}: {message}",
        )
    ran = {str(row["op"]): row["backend"] for row in explain()}
    assert {"moe_gate", "moe_permute", "grouped_matmul", "moe_unpermute"} <= ran.keys() and set(
        ran.values()
    ) == {"own"}

    apply_recompute(decoder, "auto")
    [(block, recomputed)] = recomputed_blocks(decoder)
    recomputed.probe = probe = Probe(block)
    decoder(tokens)
    recomputed.probe = None
    own = [item for item in probe.profile().operators if item.name.startswith("kernels.")]
    seen = {item.name.split(".")[1]: item for item in own}
    assert {
        "rms_norm",
        "apply_rope",
        "attention",
        "moe_gate",
        "grouped_matmul",
        "swiglu",
    } <= seen.keys()
    assert (
        all(item.keepable and item.bytes and item.seconds for item in own)
        and seen["attention"].flops == 2 * 81 * 32
    )
    launched = Mock(wraps=launch.forward)
    monkeypatch.setattr(launch, "forward", launched)
    set_retained(
        recomputed,
        RetainedOutputs("some", 0, 0.0, 0.0, tuple((item.name, item.nth) for item in own)),
    )
    again = gradients(decoder, None, tokens)
    assert (
        all(torch.equal(ours[name], gradient) for name, gradient in again.items())
        and launched.call_count == 1
    )


def test_norms_and_gates_return_fp8_directly() -> None:
    gradient, separate = [], []
    for fuse_quantization in (True, False):
        dispatch.clear_records()
        decoder = built("llama", **SMALL)
        apply_fp8(decoder, fuse_quantization=fuse_quantization)
        gradient.append(gradients(decoder, None, TOKENS))
        rounded = [row for row in explain() if row["op"] == "quantize_1x128"]
        assert {row["backend"] for row in rounded} == {"own"}
        separate.append(sum(int(str(row["calls"])) for row in rounded))
    assert separate[1] - separate[0] == 3, "two norms and a gate"
    assert all(torch.equal(gradient[1][name], item) for name, item in gradient[0].items())


def test_losses_and_update_use_own_kernels() -> None:
    decoder, plain = (built("gpt-2", **SMALL | {"kv_heads": 2}) for _ in range(2))
    assert uses_hidden_states(ParallelPlan(), CPU) and uses_hidden_states(ParallelPlan(tp=2), CPU)
    assert not uses_hidden_states(ParallelPlan.model_construct(pp=2, tp=1), CPU)
    decoder(TOKENS, None, TOKENS.roll(-1, 1)).backward()
    gradients(plain, None, TOKENS)
    for ours_parameter, plain_parameter in zip(
        decoder.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(ours_parameter.grad, plain_parameter.grad, rtol=1e-4, atol=1e-5)
        # AdamW's first update depends on the gradient's sign, so it amplifies differences in the
        # last digit
        ours_parameter.grad = plain_parameter.grad
    kind = fused_adamw(decoder.parameters())
    assert kind is not None
    ours = kind(decoder.parameters(), lr=0.01)  # type: ignore[call-arg]
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for model, optimizer in ((decoder, ours), (plain, theirs)):
        given = [item.grad.clone() for item in model.parameters() if item.grad is not None]
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        update(optimizer, given, norm=8.0, limit=1.0, scale=1.0)
    for ours_parameter, plain_parameter in zip(
        decoder.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(ours_parameter, plain_parameter, rtol=1e-5, atol=1e-7)
    ran = {(row["op"], row["backend"]) for row in explain()}
    assert {("linear_cross_entropy", "own"), ("cross_entropy", "own"), ("adamw", "own")} <= ran
