"""The decoder against published shapes and against Hugging Face's own implementations, weight for
weight.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.moe.balance_control import Balancer, routing_layers

SIZES = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 61,
    "max_seq_len": 64,
}
TOKENS = torch.arange(40).reshape(2, 20) % 61


def build(**more) -> Decoder:
    spec = ModelSpec.from_dict({**SIZES, **more})
    decoder = Decoder(spec)
    initialize(decoder, layers=spec.layers, seed=1)
    return decoder.eval()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_published_parameters(name):
    with torch.device("meta"):
        decoder = Decoder(PRESETS[name])
    assert sum(p.numel() for p in decoder.parameters()) == parameter_count(PRESETS[name]).total


MFA = {"attention": "mfa", "mfa": {"qk_rank": 12, "head_dim": 8, "heads": 6}}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


@pytest.mark.parametrize("bias", ["none", "qkv", "all"])
@pytest.mark.parametrize(
    "shape", [{}, MFA, {"attention": "mla", "mla": MLA}], ids=["softmax", "mfa", "mla"]
)
def test_biases_are_counted_as_they_are_built(shape, bias):
    moe = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "first_dense_layers": 1}
    for more in ({}, {"norm": "layernorm"}, {"moe": moe, "gated_mlp": False}):
        decoder = build(**shape, **more, bias=bias)
        assert sum(p.numel() for p in decoder.parameters()) == parameter_count(decoder.spec).total


def test_factorized_attention_is_attention_with_one_shared_head():
    """MFA's product of two query matrices as one, without the norm between, is multi-query
    attention.
    """
    factorized, plain = build(**MFA), build(heads=6, kv_heads=1, head_dim=8)
    for block in factorized.blocks.values():
        block.attn.q_latent_norm = torch.nn.Identity()
    own = dict(factorized.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("attn.q.weight"):
                before = name.removesuffix("q.weight")
                parameter.copy_(own[f"{before}q_up.weight"] @ own[f"{before}q_down.weight"])
            else:
                parameter.copy_(own[name])
    torch.testing.assert_close(factorized(TOKENS), plain(TOKENS), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [MFA, {"attention": "mla", "mla": MLA}], ids=["mfa", "mla"])
@pytest.mark.parametrize("window", [None, 5])
def test_the_past_alone_is_seen(shape, window):
    decoder = build(**shape, window=window)
    changed = TOKENS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    same = (decoder(TOKENS) == decoder(changed)).all(-1)
    assert same[:, :10].all() and not same[:, 10].any()
    assert same[:, 10 + 2 * 4 + 1 :].all() == (window is not None), (
        "two layers of a window of 5 see 8 back"
    )


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{}, MFA, {"attention": "mla", "mla": {**MLA, "q_lora_rank": 8}}],
    ids=["softmax", "mfa", "mla"],
)
def test_every_parameter_gets_a_gradient(shape, recomputed):
    moe = {
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 16,
        "shared_experts": 1,
        "first_dense_layers": 1,
        "aux_loss": 0.1,
    }
    decoder = build(**shape, moe=moe, bias="qkv").train()
    for block in decoder.blocks.values() if recomputed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    balancer = Balancer(routing_layers([decoder], decoder.spec), decoder.spec.moe)
    balancer.scale_gradients(1.0)
    decoder(TOKENS).square().sum().backward()
    norms = {
        name: p.grad.norm().item() if p.grad is not None else None
        for name, p in decoder.named_parameters()
    }
    assert all(norms.values()), norms
    loads = balancer.take(TOKENS.device)[:4]
    assert loads.sum() == TOKENS.numel() * 2, "counted once, recomputed or not"


def test_latent_attention_refuses_a_second_norm():
    with pytest.raises(ValueError, match="qk_norm"):
        build(attention="mla", mla=MLA, qk_norm=True)


def test_interleaved_rope_is_a_complex_rotation():
    from workers.contracts.specs.model import Rope
    from workers.models.layers.rope import apply_rope, rope_tables

    x = torch.randn(1, 5, 2, 8)
    turned = apply_rope(x, *rope_tables(Rope(), 8, 5, "cpu"), interleaved=True)
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.arange(5)[:, None] * frequency
    wanted = (
        torch.view_as_complex(x.unflatten(-1, (4, 2)))
        * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    )
    torch.testing.assert_close(turned, torch.view_as_real(wanted).flatten(-2), atol=1e-5, rtol=1e-5)


def test_softcap_bounds_logits():
    decoder = build(logit_softcap=0.01)
    plain = build()
    torch.testing.assert_close(decoder(TOKENS), 0.01 * torch.tanh(plain(TOKENS) / 0.01))


def test_initial_weights():
    decoder = build(bias="all", norm="layernorm", layers=8, hidden=64)
    own = dict(decoder.named_parameters())
    assert own["embed.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert own["blocks.3.mlp.down.weight"].std().item() == pytest.approx(
        0.02 / math.sqrt(16), rel=0.1
    )
    assert own["blocks.3.attn.q.bias"].count_nonzero() == 0
    assert (own["norm.weight"] == 1).all()
    again = build(bias="all", norm="layernorm", layers=8, hidden=64)
    assert all(torch.equal(p, own[name]) for name, p in again.named_parameters())
    assert not torch.equal(own["blocks.0.mlp.up.weight"], own["blocks.1.mlp.up.weight"])
