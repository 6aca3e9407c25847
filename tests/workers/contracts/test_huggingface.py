"""Hugging Face configurations against the architectures that transformers builds from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.orchestrator.planner.interchange.shapes import CONFIGS
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.huggingface import read_model

# what a preset does not share with the published file of the same model, and why
_DIFFERS = {
    "llama3-405b": {"max_seq_len", "rope"},  # the preset is Llama 3 before its context extension
    "gpt2-124m": {"dropout"},  # presets train without
    "gpt2-xl-1.5b": {"dropout"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_architecture(name: str) -> None:
    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)

    assert parameter_count(read_model(CONFIGS[name])).total == sum(
        p.numel() for p in built.parameters()
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_both_generations_of_transformers_say_the_same(name: str) -> None:
    # version 5 writes `rope_parameters` and `dtype`, and leaves out what equals its defaults
    newer = AutoConfig.for_model(**CONFIGS[name])

    assert read_model(json.loads(newer.to_json_string(use_diff=False))) == read_model(CONFIGS[name])
    assert read_model(json.loads(newer.to_json_string(use_diff=True))) == read_model(CONFIGS[name])


@pytest.mark.parametrize("name", sorted(set(CONFIGS) & set(PRESETS)))
def test_a_preset_equals_the_published_file(name: str) -> None:
    ours, read = PRESETS[name], read_model(CONFIGS[name])
    differ = {
        field for field in type(ours).model_fields if getattr(ours, field) != getattr(read, field)
    }

    assert differ - {"name"} == _DIFFERS.get(name, set())


def test_a_file_its_folder_and_its_content_are_one_model(tmp_path: Path) -> None:
    config = {**CONFIGS["llama3-405b"], "_name_or_path": "meta-llama/Llama-3.1-405B"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")

    model = read_model(path)

    assert model == read_model(str(tmp_path)) == read_model(config)
    assert model.name == "Llama-3.1-405B"
    assert model.rope.scaling is not None
    assert (model.rope.theta, model.rope.scaling.name, model.rope.scaling.original_max_seq_len) == (
        5e5,
        "llama3",
        8192,
    )


def test_a_file_of_our_own_fields_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(PRESETS["deepseek-v3"].to_json(), encoding="utf-8")

    assert read_model(path) == PRESETS["deepseek-v3"]


_LLAMA = CONFIGS["llama2-7b"]
_NEOX = CONFIGS["redpajama-incite-3b"]
_QWEN = CONFIGS["qwen2.5-7b"]
_V3 = CONFIGS["deepseek-v3"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**_LLAMA, "model_type": "bloom"}, ["bloom", "ALiBi", "llama"]),
        ({**_LLAMA, "model_type": "gemma2"}, ["gemma2", "norms after"]),
        ({**_LLAMA, "model_type": "lama"}, ["lama", "Use 'llama'"]),
        ({"model_type": "llava", "text_config": _LLAMA}, ["llava", "text_config"]),
        ({k: v for k, v in _LLAMA.items() if k != "model_type"}, ["model_type", "Add it"]),
        ({**_LLAMA, "model_type": 7}, ["model_type", "7"]),
        (
            {k: v for k, v in _LLAMA.items() if k != "hidden_size"},
            ["hidden_size", "missing", "Add"],
        ),
        ({**_LLAMA, "num_hidden_layers": 0}, ["num_hidden_layers", "0", "at least 1"]),
        ({**_LLAMA, "num_hidden_layers": True}, ["num_hidden_layers", "true", "an integer"]),
        ({**_LLAMA, "vocab_size": "32000"}, ["vocab_size", "'32000'", "an integer"]),
        ({**_LLAMA, "hidden_size": 4097}, ["hidden", "does not divide by heads"]),
        ({**_LLAMA, "num_key_value_heads": 5}, ["kv_heads", "do not divide"]),
        ({**_LLAMA, "attention_bias": True}, ["attention_bias", "Set it to false"]),
        ({**_LLAMA, "attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({**_LLAMA, "hidden_act": "xielu"}, ["hidden_act", "xielu", "silu"]),
        ({**_LLAMA, "tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
        ({**_LLAMA, "rms_norm_eps": -1.0}, ["norm_eps", "more than 0"]),
        (
            {**_LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}},
            ["rope_type", "longrope", "yarn"],
        ),
        ({**_LLAMA, "rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
        ({**_LLAMA, "rope_scaling": [8]}, ["rope_scaling", "object"]),
        (
            {**_LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
            ["truncate", "yarn"],
        ),
        (
            {**_LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            ["rope_parameters", "between layers"],
        ),
        ({**_LLAMA, "partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        ({**_NEOX, "rotary_pct": 0.25}, ["rotary_pct", "0.25"]),
        ({k: v for k, v in _NEOX.items() if k != "rotary_pct"}, ["partial_rotary_factor", "0.25"]),
        ({**_NEOX, "use_parallel_residual": True}, ["use_parallel_residual", "true"]),
        (
            {**_QWEN, "use_sliding_window": True, "max_window_layers": 14},
            ["max_window_layers", "14 of 28"],
        ),
        ({**CONFIGS["qwen3-30b-a3b"], "mlp_only_layers": [3]}, ["mlp_only_layers", "[3]"]),
        ({**_V3, "scoring_func": "softmax"}, ["scoring_func", "softmax"]),
        ({**_V3, "n_group": 7}, ["groups", "do not divide"]),
        ({**_V3, "kv_lora_rank": None}, ["kv_lora_rank", "missing"]),
        ({**CONFIGS["opt-175b"], "word_embed_proj_dim": 512}, ["word_embed_proj_dim", "512"]),
        (
            {**CONFIGS["gpt2-124m"], "attn_pdrop": 0.0},
            ["resid_pdrop", "attn_pdrop 0", "one rate everywhere"],
        ),
        ({"layers": 2, "hidden": 64}, ["heads", "missing"]),
        ({}, ["model_type"]),
    ],
)
def test_what_cannot_be_read_is_refused_by_field(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        read_model(config)

    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ["not JSON", "line 1"]),
        (b"[1, 2]", ["list", "not an object"]),
        (b"\xff\xfe\x00", ["UTF-8"]),
        (b"", ["not JSON"]),
        (b"[" * 100_000, ["too large"]),
        (b'{"layers": ' + b"9" * 5000 + b"}", ["too large"]),
        (b" " * (5 * 2**20), ["too many"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(
    content: bytes, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(ValueError) as refused:
        read_model(path)

    for word in [str(path), *words]:
        assert word in str(refused.value)


@pytest.mark.parametrize("name", ["absent.json", "empty", "\0"])
def test_a_path_without_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ValueError, match=r"\. Use "):
        read_model(tmp_path / name)


def test_special_shapes_keep_their_meaning() -> None:
    mistral, starcoder = read_model(CONFIGS["mistral-7b"]), read_model(CONFIGS["starcoder"])
    windowless = read_model(
        {k: v for k, v in CONFIGS["mistral-7b"].items() if k != "sliding_window"}
    )
    second, dense = (
        read_model(CONFIGS["qwen3-moe every second"]),
        read_model(CONFIGS["qwen3-moe two dense"]),
    )

    # MistralConfig's default where the key is absent
    assert (mistral.window, windowless.window) == (4096, 4096)
    assert (starcoder.kv_heads, starcoder.position) == (1, "learned")
    assert [i for i in range(7) if second.is_moe_layer(i)] == [1, 3, 5]
    assert [i for i in range(7) if dense.is_moe_layer(i)] == [2, 3, 4, 5, 6]
    assert read_model({**_V3, "model_type": "kimi_k2"}).moe == read_model(_V3).moe
    assert (
        read_model({**_QWEN, "use_sliding_window": True, "max_window_layers": 0}).window == 131072
    )
