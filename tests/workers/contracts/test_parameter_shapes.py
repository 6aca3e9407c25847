"""Parameter names without torch are those of the decoder, and add up to the exact counts."""

from __future__ import annotations

import pytest

from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.parameter_shapes import (
    element_count,
    frozen_names,
    parameter_shapes,
)
from workers.contracts.specs.model import ModelSpec
from workers.models.weights.parameter_shapes import weight_shapes

BASE = {
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 64,
    "max_seq_len": 64,
}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 4}
MFA = {"heads": 4, "head_dim": 8, "qk_rank": 8}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 40, "shared_experts": 1, "first_dense_layers": 1}
VARIANTS = {
    "llama": {},
    "gpt": {
        "bias": "all",
        "norm": "layernorm",
        "position": "learned",
        "gated_mlp": False,
        "tie_embeddings": True,
    },
    "qwen": {"bias": "qkv", "qk_norm": True},
    "mla": {"attention": "mla", "mla": {**MLA, "q_lora_rank": 12}, "bias": "all"},
    "mla, one query projection": {"attention": "mla", "mla": MLA},
    "mfa": {"attention": "mfa", "mfa": MFA, "qk_norm": True, "bias": "all"},
    "experts": {"moe": MOE, "bias": "all"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_the_decoders(name):
    model = ModelSpec.from_dict({**BASE, **VARIANTS[name]})
    shapes = parameter_shapes(model)
    assert shapes == weight_shapes(model)
    assert element_count(shapes) == parameter_count(model).total


def test_patterns_match_names():
    names = list(parameter_shapes(ModelSpec.from_dict({**BASE, "moe": MOE})))
    experts = frozen_names(names, ["blocks.*.mlp.experts.*"])
    assert len(experts) == 2 * 3 and all(".experts." in name for name in experts)
    assert frozen_names(names, ["*.Experts.*"]) == set()
    assert frozen_names(names, ["*"]) == set(names)
