"""Activation terms against published formulas, and against decoder layers that others wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from orchestrator.planner.model import activations  # noqa: F401  registers the terms
from tests.orchestrator.planner.predicted import predicted
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.model import ModelSpec

# Korthikanti et al. 2022 (arXiv 2205.05198), table 2, in units of s b h, a 5as/h term apart: bytes,
# of which / t
TABLE_2 = {
    "no parallelism": ({}, 34, 0, True),
    "tensor parallel": ({"tp": 8}, 10, 24, True),
    "tensor and sequence parallel": ({"tp": 8, "sequence_parallel": True}, 0, 34, True),
    "tensor parallel, selective": ({"tp": 8, "recompute": "selective"}, 10, 24, False),
    "tensor and sequence parallel, selective": (
        {"tp": 8, "sequence_parallel": True, "recompute": "selective"}, 0, 34, False,
    ),
    "full": ({"recompute": "full"}, 2, 0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_2)
def test_korthikanti_table_2(name: str) -> None:
    plan, whole, split, scores = TABLE_2[name]
    model, seq_len = preset("gpt3-175b").model_copy(update={"dropout": 0.1}), 2048
    using = {"name": "megatron", "flash_attention": False}
    table = predicted(
        model, {"precision": "bf16", **plan}, device="a100-80g", seq_len=seq_len, using=using
    )
    tp = plan.get("tp", 1)
    expected = whole + (split + (5 * model.heads * seq_len / model.hidden if scores else 0)) / tp
    # the paper leaves out each norm's mean and deviation
    statistics = (
        0.0
        if name == "full"
        else float(2 * table["residual_tokens"][0] * table["norm_statistics_bytes"][0])
    )
    bytes_ = float(table["layer_activation_dense_bytes"][0]) - statistics
    assert bytes_ == pytest.approx(seq_len * model.hidden * expected, rel=1e-12)


@pytest.mark.parametrize(
    ("using", "expected"),
    [
        # 12 + 4 g/a + 6 or 8 f/h, and 6 more for each norm in steps
        ({"fused_swiglu": True}, 12 + 1 + 21),
        ({"fused_swiglu": False}, 12 + 1 + 28),
        ({"fused_swiglu": False, "fused_norm": False}, 12 + 1 + 28 + 12),
        # ml-engineering (Bekman): 28 copies of the hidden state in eager Hugging Face code
        ({"fused_swiglu": False, "fused_norm": False, "repeats_kv": True}, 56),
    ],
)
def test_llama_block_in_bytes_of_the_hidden_state(using: dict[str, bool], expected: float) -> None:
    model, seq_len = preset("llama3-8b"), 4096
    table = predicted(
        model, {"precision": "bf16"}, seq_len=seq_len, using={"name": "fsdp2", **using}
    )
    rows = float(table["log_sum_exp_bytes"][0]) + 2 * seq_len * float(
        table["norm_statistics_bytes"][0]
    )
    bytes_ = float(table["layer_activation_dense_bytes"][0]) - rows
    assert bytes_ == pytest.approx(seq_len * model.hidden * expected, rel=1e-12)


HUGGING_FACE = {
    "name": "orrery",
    "fused_norm": False,
    "norm_weight_in_fp32": False,
    "fused_swiglu": False,
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_hugging_faces_own_layers(family: str, implementation: str) -> None:
    layer, rope, model = _hugging_face(family, implementation)
    seq_len = 256
    x = torch.randn(2, seq_len, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    tables = rope(x, torch.arange(seq_len)[None])
    given = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *tables)}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage().data_ptr()) not in given:
            held[storage] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, position_embeddings=tables, attention_mask=None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    eager = implementation == "eager"
    using = {
        **HUGGING_FACE,
        "flash_attention": not eager,
        "fused_softmax": not eager,
        "repeats_kv": eager,
    }
    plan = {"precision": "bf16", "micro_batch_size": 2}
    table = predicted(model, plan, device="cpu", seq_len=seq_len, using=using)
    assert float(table["layer_activation_dense_bytes"][0]) == pytest.approx(measured, rel=1e-3)


def _hugging_face(family: str, implementation: str) -> tuple[nn.Module, nn.Module, ModelSpec]:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    if family == "llama":
        from transformers.models.llama import modeling_llama as code

        config = transformers.LlamaConfig(**sizes, intermediate_size=896)
        config._attn_implementation = implementation
        layer, rope = code.LlamaDecoderLayer(config, 0), code.LlamaRotaryEmbedding(config)
    else:
        from transformers.models.qwen3 import modeling_qwen3 as code

        config = transformers.Qwen3Config(**sizes, intermediate_size=896, num_hidden_layers=1)
        config._attn_implementation = implementation
        layer, rope = code.Qwen3DecoderLayer(config, 0), code.Qwen3RotaryEmbedding(config)
    model = ModelSpec.from_dict(
        {
            "layers": 1,
            "hidden": 256,
            "heads": 8,
            "kv_heads": 2,
            "head_dim": 32,
            "ffn": 896,
            "vocab": 256,
            "max_seq_len": 512,
            "qk_norm": family == "qwen3",
        }
    )
    return layer.to(torch.bfloat16).train(), rope, model
