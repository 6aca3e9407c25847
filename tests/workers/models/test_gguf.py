"""GGUF files written as llama.cpp's converter writes them, read back: the same model, quantized or
not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.models.test_hugging_face import CASES, decoder_of, logits_of, their_model
from workers.models.convert import main
from workers.models.errors import WeightsError
from workers.models.weights.open import open_weights

gguf = pytest.importorskip("gguf")

# rows of 256, the block of the K quantizations
WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}
FAMILIES = {
    "llama": ("Llama", {**CASES["llama"][1], **WIDE}),
    "mixtral": ("Mixtral", {**CASES["mixtral"][1], **WIDE}),
    "qwen2": ("Qwen2", {**CASES["qwen2"][1], **WIDE}),
    "qwen3": (
        "Qwen3",
        {
            **CASES["qwen3"][1],
            **WIDE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_the_model_it_was_written_from(family, tmp_path):
    model = their_model(*FAMILIES[family])
    path = write(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    ours = decoder_of(path)
    assert ours.spec.norm_eps == pytest.approx(model.config.rms_norm_eps, rel=1e-12)
    torch.testing.assert_close(logits_of(ours), logits_of(model), atol=1e-4, rtol=0)
    assert main([str(path), str(tmp_path / "hf"), "--to", "hf"]) == 0
    torch.testing.assert_close(
        logits_of(decoder_of(tmp_path / "hf")), logits_of(ours), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("kind", "error"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 1e-2), ("Q4_0", 0.12)]
)
def test_quantized_weights_are_near(kind, error, tmp_path):
    model = their_model(*FAMILIES["llama"])
    read = open_weights(write(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]))
    wanted = model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert (read.read("blocks.1.mlp.up.weight") - wanted).norm() / wanted.norm() < error


@pytest.mark.parametrize(
    ("kind", "block_bytes", "value"),
    [
        # one block of 256 numbers by hand: scales of fp16, then 6-bit scales, then the numbers
        (
            "Q4_K",
            b"\x00\x3c\x00\x00" + b"\x01" * 4 + b"\x00" * 4 + b"\x01" * 4 + b"\x33" * 128,
            3.0,
        ),
        ("Q6_K", b"\x11" * 128 + b"\xaa" * 64 + b"\x02" * 16 + b"\x00\x3c", 2.0 * (1 + 32 - 32)),
    ],
)
def test_k_quantizations_are_undone(kind, block_bytes, value, tmp_path):
    """The package cannot write them: all blocks of one tensor are equal, with known numbers."""
    import numpy as np

    model = their_model(*FAMILIES["llama"])
    raw = np.frombuffer(block_bytes * 512, dtype=np.uint8).reshape(512, len(block_bytes))
    path = write(
        model,
        tmp_path / "model.gguf",
        gguf.GGMLQuantizationType.F32,
        instead={"blk.1.ffn_up.weight": (raw, gguf.GGMLQuantizationType[kind])},
    )
    read = open_weights(path).read("blocks.1.mlp.up.weight")
    assert read.shape == (512, 256)
    assert read.unique().tolist() == [value]


def test_llama3_frequencies_are_recognized(tmp_path):
    model = their_model(*FAMILIES["llama"])
    wavelength = 2 * torch.pi * 1e4 ** (torch.arange(0, 64, 2) / 64)
    ramp = ((8192 / wavelength - 1) / 3).clamp(0, 1)
    factors = 1 / (ramp + (1 - ramp) / 8)
    path = write(
        model,
        tmp_path / "model.gguf",
        gguf.GGMLQuantizationType.F32,
        more={"rope_freqs.weight": factors},
    )
    scaling = open_weights(path).spec.rope.scaling
    assert scaling is not None and (scaling.name, scaling.factor) == ("llama3", 8.0)
    odd = write(
        model,
        tmp_path / "odd.gguf",
        gguf.GGMLQuantizationType.F32,
        more={"rope_freqs.weight": factors + 1},
    )
    with pytest.raises(WeightsError, match=r"not those of Llama 3\.1"):
        open_weights(odd)


def test_files_that_are_no_whole_gguf(tmp_path, capsys):
    whole = write(
        their_model(*FAMILIES["llama"]), tmp_path / "whole.gguf", gguf.GGMLQuantizationType.F32
    )
    for name, data in (
        ("cut", whole.read_bytes()[:5000]),
        ("noise", b"\x07" * 4096),
        ("empty", b""),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        assert main([str(path), str(tmp_path / "out")]) == 64
        assert "not a complete GGUF file" in capsys.readouterr().err
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    finish(writer)
    with pytest.raises(
        WeightsError, match="architecture is 'bert'; those that can be read are llama"
    ):
        open_weights(tmp_path / "bert.gguf")


def write(
    model: Any,
    path: Path,
    kind: Any,
    *,
    more: dict[str, torch.Tensor] | None = None,
    instead: dict[str, Any] | None = None,
    also: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """As llama.cpp's convert_hf_to_gguf.py: queries and keys of Llama in pairs, experts stacked,
    norms in fp32.
    """
    config = model.config
    moe = hasattr(config, "num_local_experts")
    arch = "llama" if config.model_type in ("llama", "mixtral") else config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    also(writer)
    if moe:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    tensors: dict[str, torch.Tensor] = dict(more or {})
    for name, tensor in model.state_dict().items():
        for theirs, its in NAMES.items():
            name = name.replace(theirs, its)
        if arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            tensor = (
                tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            )
        if name.endswith("mlp.experts.gate_up_proj"):
            block = name.removesuffix("mlp.experts.gate_up_proj")
            tensors[f"{block}ffn_gate_exps.weight"], tensors[f"{block}ffn_up_exps.weight"] = (
                tensor.chunk(2, dim=1)
            )
        elif name.endswith("mlp.experts.down_proj"):
            tensors[name.replace("mlp.experts.down_proj", "ffn_down_exps.weight")] = tensor
        elif not (name == "output.weight" and config.tie_word_embeddings):
            tensors[name] = tensor
    for name, tensor in tensors.items():
        if name in (instead or {}):
            raw, its_kind = (instead or {})[name]
            writer.add_tensor(name, raw, raw_dtype=its_kind)
            continue
        kind_here = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        values = gguf.quantize(tensor.float().contiguous().numpy(), kind_here)
        writer.add_tensor(name, values, raw_dtype=kind_here)
    return finish(writer, path)


def finish(writer: Any, path: Path | None = None) -> Any:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
