"""Greedy answers equal transformers' own, token for token, for each model family."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.workers.inference.test_engine import engine_of, finished
from workers.inference.sampling.parameters import SamplingParams
from workers.models.decoder import Decoder
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model

NEW = 64
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 7}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2",
        {
            "n_layer": 2,
            "n_embd": 32,
            "n_head": 4,
            "n_inner": 48,
            "vocab_size": 61,
            "n_positions": 128,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_greedy_answers_are_theirs(family, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        name, sizes = FAMILIES[family]
        ends = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
        config = getattr(transformers, f"{name}Config")(**sizes, **ends)
        torch.manual_seed(2)
        theirs = getattr(
            transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel"
        )(config).eval()
        theirs.save_pretrained(tmp_path)
    weights = open_weights(tmp_path)
    decoder = Decoder(weights.spec)
    fill_model(decoder, weights)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(61, (5, length), generator=generator) for length in (2, 9, 17, 40)]
    given = [
        (prompt, SamplingParams(max_new_tokens=NEW, temperature=0))
        for ids in batches
        for prompt in ids.tolist()
    ]
    ours = [each.output_tokens for each in finished(engine_of(decoder, blocks=700), given)]
    wanted = []
    for ids in batches:  # each of one length, so that nothing is padded
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
            )
        wanted += answers[:, ids.shape[1] :].tolist()
    assert ours == wanted


@pytest.mark.parametrize(
    "params",
    [{}, {"length_penalty": 0.0, "early_stopping": True}, {"length_penalty": 2.0}],
    ids=str,
)
def test_beams_are_theirs(params, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            **SIZES, bos_token_id=None, eos_token_id=[5, 9], initializer_range=0.3
        )
        config.pad_token_id = 0
        torch.manual_seed(2)
        theirs = transformers.LlamaForCausalLM(config).eval()
        theirs.save_pretrained(tmp_path)
    weights = open_weights(tmp_path)
    decoder = Decoder(weights.spec)
    fill_model(decoder, weights)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 61, (10, 7), generator=generator)
    sampling = SamplingParams(max_new_tokens=16, beams=4, n=3, stop_token_ids=(5, 9), **params)
    engine = engine_of(decoder, blocks=60, sequences=9, step_tokens=12)
    requests = [engine.add(prompt, sampling) for prompt in ids.tolist()]
    ended: dict[int, list[Any]] = {}
    while engine.busy:
        for each in engine.step():
            if each.finish:
                ended.setdefault(each.parent, []).append(each)
    assert engine.scheduler.pool.used == 0 and not engine.beams.groups
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            num_beams=4,
            num_return_sequences=3,
            do_sample=False,
            pad_token_id=0,
            **params,
        )
    wanted = answers[:, 7:].reshape(10, 3, -1).tolist()
    for request, three in zip(requests, wanted, strict=True):
        assert [each.output_tokens for each in ended[request.number]] == [
            _until_end(each) for each in three
        ]


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[
        : next((place + 1 for place, token in enumerate(tokens) if token in (5, 9)), len(tokens))
    ]
