"""Serving: published KV cache sizes, rooflines against known figures, advice, refusals, and the
explain tree.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from orchestrator.planner.serving import serving

H200 = {"device": "h200-141g", "nodes": 1, "devices_per_node": 8}


def query(model: Any = "llama3-8b", cluster: dict[str, Any] = H200, **more: Any) -> dict[str, Any]:
    answer = serving({"model": model, "cluster": cluster, **more})
    assert answer["ok"], answer["problems"]
    return answer


# bytes per token of the whole model in 16 bit, as published: vLLM paper section 3; DeepSeek, arXiv
# 2505.09343, table 1
PUBLISHED = [
    ({"layers": 40, "hidden": 5120, "heads": 40, "head_dim": 128}, 819_200),  # OPT-13B
    # Qwen-2.5 72B
    ({"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128}, 327_680),
    # LLaMA-3.1 405B
    ({"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "head_dim": 128}, 516_096),
]


@pytest.mark.parametrize(("sizes", "published"), PUBLISHED)
def test_kv_cache_of_published_models(sizes: dict[str, int], published: int) -> None:
    """Key and value, and key-value heads: a cache without the factor 2 or with query heads is a
    known mistake.
    """
    model = {**sizes, "ffn": 4 * sizes["hidden"], "vocab": 32000, "max_seq_len": 8192}
    assert query(model)["kv_bytes_per_token"] == published


def test_the_latent_cache_is_not_divided_by_tp() -> None:
    one, eight = (query("deepseek-v3", tp=tp, quantize="fp8") for tp in (1, 8))
    assert one["kv_bytes_per_token"] == 70_272  # arXiv 2505.09343, table 1
    assert (
        one["memory"]["kv_bytes_per_sequence_device"]
        == eight["memory"]["kv_bytes_per_sequence_device"]
    )


def test_key_value_heads_are_copied_beyond_their_number() -> None:
    held = [query("llama3-8b", tp=tp)["memory"]["kv_bytes_per_sequence_device"] for tp in (1, 4, 8)]
    assert held[0] == 4 * held[1] == 8 * held[2]
    mqa = {
        "layers": 2,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 1,
        "ffn": 512,
        "vocab": 512,
        "max_seq_len": 4096,
    }
    assert (
        len({query(mqa, tp=tp)["memory"]["kv_bytes_per_sequence_device"] for tp in (1, 2, 8)}) == 1
    )


def test_a_window_bounds_the_cache() -> None:
    model = {"layers": 2, "hidden": 512, "heads": 8, "ffn": 512, "vocab": 512, "max_seq_len": 65536}
    whole = query(model, prompt_len=8192, output_len=8192)["kv_bytes_per_sequence"]
    assert (
        query({**model, "window": 1024}, prompt_len=8192, output_len=8192)["kv_bytes_per_sequence"]
        * 16
        == whole
    )


def test_decode_of_13b_on_an_a100_is_near_what_was_measured() -> None:
    """22.0 ms measured in the vLLM paper's setting (OPT-13B class on A100-40GB); 16.7 ms would be
    the bare stream.
    """
    answer = query("llama2-13b", {"device": "a100-40g"}, batch=1, prompt_len=128, output_len=128)
    assert answer["tpot_s"] == pytest.approx(22.0e-3, rel=0.1)
    assert answer["bound"] == "memory bandwidth"


def test_the_crossover_batch_is_peak_over_bandwidth() -> None:
    assert query(cluster={"device": "h100-80g"})["crossover_batch"] == pytest.approx(295, abs=1)


@pytest.mark.parametrize("batch", [1, 64])
def test_batch_time_per_token_and_throughput_reconcile(batch: int) -> None:
    answer = query(batch=batch)
    while_decoding = batch / answer["tpot_s"]
    assert answer["tokens_per_s"] == pytest.approx(while_decoding * (1 - answer["prompt_share"]))
    [note] = [note for note in answer["notes"] if "while all decode" in note]
    assert f"{while_decoding:,.0f} tokens/s" in note and f"{answer['tokens_per_s']:,.0f}" in note


def test_larger_batches_trade_latency_for_throughput() -> None:
    curve = query()["curve"]
    assert [point["batch"] for point in curve] == sorted({point["batch"] for point in curve})
    assert all(
        a["tpot_s"] <= b["tpot_s"] and a["tokens_per_s"] <= b["tokens_per_s"]
        for a, b in itertools.pairwise(curve)
    )


def test_speculative_gain_follows_leviathan() -> None:
    """arXiv 2211.17192: at α 0.8, γ 5 the expected tokens a step are (1 - 0.8^6) / 0.2."""
    result = query(acceptance=0.8, draft_tokens=5, draft_cost=0.05)["speculative"]
    assert result["accepted_per_step"] == pytest.approx((1 - 0.8**6) / 0.2)
    assert result["speculative_speedup"] == pytest.approx(result["accepted_per_step"] / 1.25)
    assert query(acceptance=0.05, draft_cost=0.9)["speculative"]["pays"] is False
    assert query(acceptance=1.0, draft_tokens=4)["speculative"][
        "accepted_per_step"
    ] == pytest.approx(5)


def test_suggestions_for_requests_that_do_not_fit() -> None:
    answer = query("llama3-70b", {"device": "h100-80g", "devices_per_node": 8})
    assert answer["fits"] is False and answer["suggestions"][0].startswith("quantize")
    for change in answer["suggestions"]:
        field, value = change.split()
        fixed = {field: int(value) if value.isdigit() else value}
        assert query("llama3-70b", {"device": "h100-80g", "devices_per_node": 8}, batch=1, **fixed)[
            "fits"
        ], change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tp": 3}, "tp"),
        ({"tp": 16, "replicas": 64}, "tp"),
        ({"pp": 64}, "pp"),
        ({"prompt_len": 10**6}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"quantize": "int3"}, "quantize"),
        ({"colour": "red"}, "colour"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"model": "llama9"}, "model"),
    ],
)
def test_invalid_requests_are_reported(change: dict[str, Any], field: str) -> None:
    answer = serving({"model": "llama3-8b", "cluster": H200, **change})
    assert answer["ok"] is False
    assert any(
        each["field"].startswith(field) and each["message"] for each in answer["problems"]
    ), answer["problems"]


def test_every_number_opens_its_formula() -> None:
    plain = query(acceptance=0.7)
    tree = serving({"model": "llama3-8b", "cluster": H200, "acceptance": 0.7}, explained=True)
    assert tree["tpot_s"]["value"] == plain["tpot_s"] and tree["tpot_s"]["source"]
    names = set()

    def walk(node: dict[str, Any]) -> None:
        names.add(node["name"])
        assert node["formula"] and (node["inputs"] or node["formula"] == "given")
        assert all(math.isfinite(each) for each in [node["value"]])
        for each in node["inputs"]:
            walk(each)

    walk(tree["tpot_s"])
    assert {"decode_memory_s", "memory_bandwidth", "weights_bytes", "params_total"} <= names
