"""What a request leaves open: the choice, the engine's default, and the wider interval."""

from __future__ import annotations

from typing import Any

from orchestrator.planner import api
from orchestrator.planner.model.priors import PEERS

PLAN = {
    "dp": 8,
    "zero": 3,
    "recompute": "full",
    "precision": "bf16",
    "micro_batch_size": 1,
    "global_batch_size": 64,
}


def answer(plan: dict[str, Any], framework: Any = "llm-foundry", **cluster: Any) -> dict[str, Any]:
    line = {
        "model": "llama3-8b",
        "plan": plan,
        "cluster": {"device": "h100-80g", "nodes": 1, "devices_per_node": 8, **cluster},
        "workload": {"seq_len": 4096},
        "framework": framework,
    }
    [result] = api.estimate([line])
    return result


def width(result: dict[str, Any]) -> float:
    return float(result["step_time_high_s"] / result["step_time_low_s"])


def test_an_open_micro_batch_is_the_fastest_that_fits():
    stated, chosen = answer(PLAN), answer({**PLAN, "micro_batch_size": None})
    assert chosen["ok"] and chosen["fits"]
    assert chosen["step_time_s"] <= stated["step_time_s"]
    assert width(chosen) > width(stated)
    assert any("Not stated: micro-batch" in note for note in chosen["notes"])
    assert not any("Not stated" in note for note in stated["notes"])


def test_open_virtual_stages_make_an_interleaved_plan_legal():
    plan = {**PLAN, "dp": 2, "pp": 4, "zero": 1, "schedule": "interleaved_1f1b"}
    chosen = answer({**plan, "virtual_stages": None}, "megatron")
    assert chosen["ok"], chosen["problems"]
    assert any("virtual stages" in note for note in chosen["notes"])


def test_switches_that_are_not_given_count_at_the_engines_default():
    plan = {**PLAN, "tp": 2, "dp": 4, "sequence_parallel": True}
    silent = answer(plan, "fsdp2")
    stated = answer(plan, {"name": "fsdp2", "compile": False, "async_tp": False})
    faster = answer(plan, {"name": "fsdp2", "compile": True, "async_tp": True})
    assert silent["step_time_s"] == stated["step_time_s"] > faster["step_time_s"]
    assert width(silent) > width(stated)
    assert any("asynchronous tensor parallelism is off" in note for note in silent["notes"])


def test_an_unmeasured_engine_is_never_faster_than_the_best_published_run():
    result = answer({**PLAN, "recompute": "none", "micro_batch_size": 2}, "orrery")
    assert result["mfu"] <= PEERS["h100-80g half"]
    [note] = [each for each in result["notes"] if "No measurement of orrery on h100-80g" in each]
    assert "20 steps" in note
    assert width(result) > width(answer(PLAN))


def test_both_peaks():
    memory = answer(PLAN, "fsdp2")["memory"]
    assert memory["total_bytes"] < memory["reserved_bytes"] < memory["capacity_bytes"]
    on_cpu = answer({**PLAN, "precision": "fp32"}, device="cpu")["memory"]
    assert on_cpu["reserved_bytes"] == on_cpu["total_bytes"]
