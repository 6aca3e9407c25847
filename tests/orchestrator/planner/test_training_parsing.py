"""A planner request says what it trains: adapters, objectives, frozen names, a teacher."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.planner import answers, api
from orchestrator.planner.plan_request import BadRequest
from orchestrator.planner.request_parsing import parse_line
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import preset

LINE = {
    "model": "llama3-8b",
    "cluster": {"device": "h100-80g", "nodes": 1, "devices_per_node": 1},
    "workload": {"seq_len": 2048},
    "plan": {"precision": "bf16"},
}


def answer(**more: Any) -> dict[str, Any]:
    parsed = parse_line({**LINE, **more})
    assert parsed.request is not None, parsed.problems
    [result] = answers.answer_requests([parsed.request])
    return result


def test_adapters_fit_where_full_training_does_not():
    full = answer()
    lora = answer(train={"adapter": {"method": "lora", "rank": 16}})
    qlora = answer(train={"adapter": {"method": "qlora", "rank": 16}})
    assert (full["fits"], lora["fits"], qlora["fits"]) == (False, True, True)
    assert qlora["memory"]["params_bytes"] < lora["memory"]["params_bytes"] / 2
    # a third of the products is spared; dequantization costs time
    assert 0.5 < lora["step_time_s"] / full["step_time_s"] < 0.75
    assert lora["step_time_s"] < qlora["step_time_s"]


def test_second_modules_cost_memory_and_time():
    full, pairs = answer(), answer(train={"objective": "dpo"})
    weights = parameter_count(preset("llama3-8b")).total
    assert pairs["memory"]["reference_bytes"] == 2 * weights
    assert 1.15 < pairs["step_time_s"] / full["step_time_s"] < 1.35
    lora = {"adapter": {"method": "lora"}}
    off = answer(train={"objective": "dpo", **lora})
    assert off["memory"]["reference_bytes"] == 0
    assert off["step_time_s"] > answer(train=lora)["step_time_s"]
    taught = answer(train={"objective": "distill"}, teacher="llama3-70b")
    assert taught["memory"]["reference_bytes"] == 2 * parameter_count(preset("llama3-70b")).total
    assert taught["memory"]["logits_bytes"] > 5 * full["memory"]["logits_bytes"]


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        ({"train": {"steps": 3}}, "train.steps", "not a field that the planner reads"),
        ({"train": []}, "train", "an object"),
        ({"train": {"objective": "distill"}}, "train.distill", "needs a teacher"),
        ({"train": {"adapter": {"method": "x"}}}, "train.adapter.method", "lora"),
        ({"train": {"freeze": ["nothing.*"]}}, "train.freeze.0", "does not match any"),
        ({"train": {"objective": "sft"}, "teacher": "llama3-8b"}, "teacher", "distill"),
        ({"teacher": "llama3-8b"}, "teacher", "distill"),
        (
            {"train": {"objective": "distill"}, "teacher": "gpt2-124m"},
            "teacher",
            "vocabulary has 50257",
        ),
        ({"train": {"objective": "distill"}, "teacher": "no-model"}, "teacher", "no-model"),
    ],
)
def test_wrong_training_is_refused_by_field(more, field, message):
    parsed = parse_line({**LINE, **more})
    assert parsed.request is None
    [problem] = [each for each in parsed.problems if each.field == field]
    assert message in f"{problem.message} {problem.hint}"


def test_a_search_splits_devices_between_training_and_rollouts():
    rollout = {"devices": "auto", "sync": "separate", "max_new_tokens": 64}
    grpo = {"rewards": [{"kind": "exact"}], "rollout": rollout, "prompts_per_step": 4}
    request = {
        "model": "llama-15m",
        "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 4},
        "workload": {"seq_len": 128, "global_batch_size": 32},
        "train": {"objective": "grpo", "grpo": grpo},
        "top": 2,
    }
    result = api.search(request)
    assert [(each["training"], each["rollouts"]) for each in result["splits"]] == [
        (3, 1),
        (2, 2),
        (1, 3),
    ]
    timed = {each["rollouts"]: each["step_time_s"] for each in result["splits"] if each["plan"]}
    assert timed[result["rollout_devices"]] == min(timed.values())
    assert result["plans"][0]["step_time_s"] == min(timed.values()) and len(result["plans"]) <= 2
    with pytest.raises(BadRequest, match="cannot be split"):
        api.search({**request, "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 1}})
