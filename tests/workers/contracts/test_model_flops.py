"""Model FLOPs of trained, frozen and adapted weights are those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from workers.contracts.catalog.model_flops import (
    flops_per_token,
    forward_flops_per_token,
    lookup_parameters,
    model_flops,
    training_flops_per_token,
)
from workers.contracts.catalog.parameter_shapes import frozen_names, parameter_shapes
from workers.contracts.catalog.presets import PRESETS, preset
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody
from workers.models.adapters.apply import apply_adapter, freeze, quantize_frozen, trained_names
from workers.models.decoder import Decoder
from workers.training.objectives.token_losses import token_loss

TINY = {
    "name": "tiny",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "ffn": 128,
    "vocab": 96,
    "max_seq_len": 32,
}
TOKENS = 16


def body(**options: Any) -> TrainBody:
    init = {"init_from": {"path": "base"}} if "adapter" in options else {}
    return TrainBody.from_dict({"steps": 1, "seq_len": TOKENS, **init, **options})


def counted(model: ModelSpec, train: TrainBody) -> int:
    """FLOPs of one sequence's step by torch's counter, attention without a fused kernel."""
    decoder = Decoder(model)
    if train.adapter is not None:
        apply_adapter(decoder, train.adapter)
        freeze(decoder, trained_names(decoder, train.adapter), torch.float32)
        for parameter in decoder.parameters():
            parameter.data.zero_()
        if train.adapter.storage == "nf4":
            quantize_frozen(decoder)
    else:
        names = [name for name, _ in decoder.named_parameters()]
        freeze(decoder, set(names) - frozen_names(names, train.freeze), torch.float32)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        token_loss(decoder(tokens), tokens).backward()
    return int(counter.get_total_flops())


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({}, {}),
    "all, tied": ({"tie_embeddings": True}, {}),
    "grouped heads": ({"kv_heads": 2}, {}),
    "not gated": ({"gated_mlp": False, "activation": "gelu", "norm": "layernorm"}, {}),
    "lower layers frozen": ({}, {"freeze": ["embed.*", "blocks.0.*"]}),
    "upper layers frozen": ({}, {"freeze": ["blocks.1.*", "head.*", "norm.*"]}),
    "head frozen": ({}, {"freeze": ["head.weight"]}),
    "attention frozen": ({}, {"freeze": ["*.attn.*", "embed.*"]}),
    "lora": ({}, {"adapter": {"method": "lora", "rank": 4}}),
    "lora of values": ({}, {"adapter": {"method": "lora", "rank": 4, "targets": ["v"]}}),
    "lora, head saved": (
        {},
        {"adapter": {"method": "lora", "rank": 4, "modules_to_save": ["head", "embed"]}},
    ),
    "qlora": ({}, {"adapter": {"method": "qlora", "rank": 4}}),
    "bottleneck": ({}, {"adapter": {"method": "adapter", "rank": 4}}),
    "ia3": ({}, {"adapter": {"method": "ia3"}}),
    "bitfit": ({}, {"adapter": {"method": "bitfit"}}),
    "prefix": ({}, {"adapter": {"method": "prefix", "rank": 4}}),
}


@pytest.mark.parametrize("name", CASES)
def test_products_and_attention_are_those_that_torch_counts(name):
    """Exactly: torch counts products of matrices, to which norms and biases add a little."""
    changes, options = CASES[name]
    model, train = ModelSpec.from_dict({**TINY, **changes}), body(**options)
    flops = model_flops(model, train)
    vectors = ("norm.weight", "norm.bias", ".bias", "ia3_l")
    products = sum(value for key, value in flops.products.items() if not key.endswith(vectors))
    assert counted(model, train) == TOKENS * (products + flops.attention)
    assert flops.total == training_flops_per_token(model, train)


@pytest.mark.parametrize("name", PRESETS)
def test_all_weights_count_six_times_without_the_lookup(name):
    model = preset(name)
    total = model_flops(model, body()).total
    assert total == pytest.approx(flops_per_token(model, TOKENS), rel=1e-12)
    tied = lookup_parameters(model) < model.vocab * model.hidden
    assert model.tie_embeddings is tied
    assert forward_flops_per_token(model, TOKENS) == pytest.approx(total / 3)


def test_a_frozen_weight_counts_four_and_an_adapter_counts_its_own():
    model = preset("llama3-8b")
    full = training_flops_per_token(model, body())
    lora = model_flops(model, body(adapter={"method": "lora", "rank": 16}))
    base = sum(value for key, value in lora.products.items() if ".lora_" not in key)
    assert base == pytest.approx(4 / 6 * (full - lora.attention), rel=0.002)
    own = sum(value for key, value in lora.products.items() if ".lora_" in key)
    assert own == pytest.approx(6 * 41_943_040, rel=0.01)
    frozen = body(freeze=["embed.*", *(f"blocks.{layer}.*" for layer in range(16))])
    assert model_flops(model, frozen).products["blocks.3.attn.q.weight"] == 2 * 4096**2
    assert set(model_flops(model, frozen).products) == set(parameter_shapes(model)) - {
        "embed.weight"
    }


def test_a_second_module_counts_its_forward_pass():
    student, teacher = preset("llama-tiny"), preset("llama-15m")
    alone = training_flops_per_token(student, body())
    pairs = {"objective": "dpo", "dpo": {}}
    with_reference = training_flops_per_token(student, body(**pairs))
    assert with_reference == pytest.approx(alone * 4 / 3)
    without = training_flops_per_token(student, body(objective="dpo", dpo={"loss": "simpo"}))
    assert without == alone
    distill = body(objective="distill", distill={"teacher": {"path": "teacher"}})
    taught = training_flops_per_token(student, distill, second=teacher)
    assert taught == pytest.approx(alone + forward_flops_per_token(teacher, TOKENS))
