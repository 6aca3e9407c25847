"""Parameter counts against the totals that the models' own checkpoints have."""

from __future__ import annotations

import pytest

from workers.contracts.catalog.counts import kv_elements_per_token, parameter_count
from workers.contracts.catalog.model_flops import flops_per_token
from workers.contracts.catalog.presets import PRESETS, preset, resolve_model
from workers.contracts.specs.model import ModelSpec

# sums over the tensors of the published checkpoints (Hugging Face, model.safetensors)
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "gpt2-124m": 124_439_808,
    "gpt2-xl-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    # 671,026,419,200 in the checkpoint, of which 58 x 256 are the routers' balancing biases
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "deepseek-v2": 235_741_434_880,
}
# in billions, as the papers round them
ACTIVE = {"mixtral-8x7b": 12.9, "deepseek-v3": 37.6, "deepseek-v2": 21.4, "qwen3-30b-a3b": 3.35}


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_one(name: str) -> None:
    assert parameter_count(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_parts_add_up(name: str) -> None:
    model = preset(name)
    count = parameter_count(model)
    experts = model.moe.experts if model.moe else 0
    layers = sum(
        count.layer(moe=model.is_moe_layer(i), experts=experts) for i in range(model.layers)
    )
    assert count.embedding + count.positions + count.head + count.final_norm + layers == count.total
    if name in ACTIVE:
        assert count.active / 1e9 == pytest.approx(ACTIVE[name], rel=0.01)
    elif model.moe:
        assert count.active < count.total
    else:
        assert count.active == count.total


SMALL = {
    "mqa-3m": ("softmax", 1, False),
    "mla-3m": ("mla", 7, False),
    "mfa-4m": ("mfa", 10, False),
    "moe-8m": ("softmax", 2, True),
    "mla-moe-6m": ("mla", 6, True),
}


@pytest.mark.parametrize("name", SMALL)
def test_each_architecture_has_a_small_model_over_bytes(name: str) -> None:
    model = preset(name)
    assert (model.attention, model.kv_heads, model.moe is not None) == SMALL[name]
    assert 1e6 < parameter_count(model).total < 15e6 and model.vocab == 256


def test_flops_follow_the_stated_convention() -> None:
    llama = preset("llama3-8b")
    # without the input embedding table, which the untied head does not share
    products = 6 * (8_030_261_248 - 128_256 * 4096)
    assert flops_per_token(llama, 8192) == products + 12 * 32 * 4096 * 8192
    assert flops_per_token(llama, 8192, attention="causal") == products + 6 * 32 * 4096 * 8192
    assert flops_per_token(llama, 8192) / 1e9 == pytest.approx(57.91, abs=0.01)
    gpt2 = preset("gpt2-124m")
    assert flops_per_token(gpt2, 1024) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    mixtral = preset("mixtral-8x7b")
    assert flops_per_token(mixtral, 1) < 6.1 * parameter_count(mixtral).active


def test_kv_cache_of_grouped_and_latent_attention() -> None:
    assert kv_elements_per_token(preset("llama3-8b")) == 2 * 32 * 8 * 128
    assert kv_elements_per_token(preset("deepseek-v3")) == 61 * 576


def test_the_examples_shapes_count_as_built_by_hand() -> None:
    mfa = ModelSpec(
        layers=2,
        hidden=64,
        heads=4,
        ffn=128,
        vocab=256,
        max_seq_len=32,
        attention="mfa",
        mfa={"qk_rank": 32, "head_dim": 16, "heads": 8},
    )
    attention = 64 * 32 + 32 + 32 * 128 + 2 * 64 * 16 + 128 * 64
    assert parameter_count(mfa).attention == attention
    biased = ModelSpec(
        layers=1,
        hidden=64,
        heads=4,
        ffn=128,
        vocab=256,
        max_seq_len=32,
        bias="qkv",
        norm="layernorm",
    )
    assert parameter_count(biased).attention == 4 * 64 * 64 + 3 * 64
    assert parameter_count(biased).norms == 2 * 64


def test_a_wrong_preset_names_the_near_ones() -> None:
    with pytest.raises(ValueError, match="llama3-8b"):
        preset("llama-3-8b")
    assert resolve_model("llama-tiny") is PRESETS["llama-tiny"]
