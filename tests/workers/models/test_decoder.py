"""The decoder against published shapes and against Hugging Face's own implementations, weight for weight."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from workers.contracts.counts import parameter_count
from workers.contracts.model import ModelSpec
from workers.contracts.presets import PRESETS
from workers.models.decoder import Decoder
from workers.models.initialise import initialise

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61, "max_seq_len": 64}
TOKENS = torch.arange(40).reshape(2, 20) % 61


def build(**more) -> Decoder:
    spec = ModelSpec.from_dict({**SIZES, **more})
    decoder = Decoder(spec)
    initialise(decoder, layers=spec.layers, seed=1)
    return decoder.eval()


DENSE = sorted(name for name, spec in PRESETS.items() if spec.attention == "softmax" and spec.moe is None)


@pytest.mark.parametrize("name", DENSE)
def test_presets_have_their_published_parameters(name):
    with torch.device("meta"):
        decoder = Decoder(PRESETS[name])
    assert sum(p.numel() for p in decoder.parameters()) == parameter_count(PRESETS[name]).total


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(DENSE)))
def test_other_presets_are_refused(name):
    with pytest.raises(ValueError, match="softmax attention without experts"):
        Decoder(PRESETS[name])


def test_unknown_rope_scaling_is_refused():
    with pytest.raises(ValueError, match="yarn"):
        build(rope={"scaling": {"name": "yarn", "factor": 4.0}})


LLAMA3 = {"name": "llama3", "factor": 8.0, "original_max_seq_len": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HF_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize("scaling", [None, "llama3"])
def test_llama_of_hugging_face(scaling):
    ours = build(rope={"theta": 10000.0, "scaling": LLAMA3 if scaling else None})
    assert_same_logits(ours, "Llama", {"rope_parameters": HF_LLAMA3} if scaling else {})


def test_tied_qwen3_of_hugging_face():
    ours = build(tie_embeddings=True, qk_norm=True, head_dim=16, rope={"theta": 5e5}, norm_eps=1e-6)
    more = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rms_norm_eps": 1e-6}
    assert_same_logits(ours, "Qwen3", {**more, "tie_word_embeddings": True})


def test_windowed_mistral_of_hugging_face():
    assert_same_logits(build(window=7), "Mistral", {"sliding_window": 7})


def test_gpt2_of_hugging_face():
    gpt = {"norm": "layernorm", "position": "learned", "gated_mlp": False, "activation": "gelu_tanh", "bias": "all"}
    ours = build(**gpt, kv_heads=4, tie_embeddings=True)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    config, model = hugging_face("GPT2")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 48, "vocab_size": 61, "n_positions": 64}
    theirs = model(config(**sizes, layer_norm_epsilon=1e-5)).eval()
    own = dict(ours.named_parameters())
    names = {
        "attn_norm": "ln_1", "mlp_norm": "ln_2", "attn.o": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    state = {"transformer.wte.weight": own["embed.weight"], "transformer.wpe.weight": own["positions.weight"]}
    state |= {f"transformer.ln_f.{kind}": own[f"norm.{kind}"] for kind in ("weight", "bias")}
    for layer in range(2):
        for kind in ("weight", "bias"):
            # Conv1D keeps weights transposed, and queries, keys and values in one
            qkv = torch.cat([own[f"blocks.{layer}.attn.{part}.{kind}"] for part in "qkv"])
            state[f"transformer.h.{layer}.attn.c_attn.{kind}"] = qkv.T if kind == "weight" else qkv
            for mine, hers in names.items():
                value = own[f"blocks.{layer}.{mine}.{kind}"]
                state[f"transformer.h.{layer}.{hers}.{kind}"] = value.T if value.ndim == 2 else value
    state["lm_head.weight"] = own["embed.weight"]
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-4)


def test_interleaved_rope_is_a_complex_rotation():
    from workers.contracts.model import Rope
    from workers.models.rope import apply_rope, rope_tables

    x = torch.randn(1, 5, 2, 8)
    turned = apply_rope(x, *rope_tables(Rope(), 8, 5, "cpu"), interleaved=True)
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.arange(5)[:, None] * frequency
    wanted = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    torch.testing.assert_close(turned, torch.view_as_real(wanted).flatten(-2), atol=1e-5, rtol=1e-5)


def test_softcap_bounds_logits():
    decoder = build(logit_softcap=0.01)
    plain = build()
    torch.testing.assert_close(decoder(TOKENS), 0.01 * torch.tanh(plain(TOKENS) / 0.01))


def test_initial_weights():
    decoder = build(bias="all", norm="layernorm", layers=8, hidden=64)
    own = dict(decoder.named_parameters())
    assert own["embed.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert own["blocks.3.mlp.down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
    assert own["blocks.3.attn.q.bias"].count_nonzero() == 0
    assert (own["norm.weight"] == 1).all()
    again = build(bias="all", norm="layernorm", layers=8, hidden=64)
    assert all(torch.equal(p, own[name]) for name, p in again.named_parameters())
    assert not torch.equal(own["blocks.0.mlp.up.weight"], own["blocks.1.mlp.up.weight"])


def hugging_face(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        model = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
        return getattr(transformers, f"{family}Config"), getattr(transformers, model)


def assert_same_logits(ours: Decoder, family: str, more: dict) -> None:
    config, model = hugging_face(family)
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    theirs = model(config(**{**sizes, **more})).eval()
    names = {
        "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "blocks": "model.layers",
        "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn": "self_attn",
        "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj",
        "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
    }  # fmt: skip
    state = {}
    for name, parameter in ours.named_parameters():
        state[".".join(names.get(part, part) for part in name.split("."))] = parameter
    if ours.head is None:
        state["lm_head.weight"] = ours.embed.weight
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-4)
