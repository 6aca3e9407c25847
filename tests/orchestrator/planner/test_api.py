"""The public functions: shape of answers, order, explain trees, searches, serving, export."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from orchestrator.planner import api
from orchestrator.planner.explain import ExplainOptions, parse_explain_options
from orchestrator.planner.plan_request import BadRequest
from orchestrator.planner.request_parsing import parse_json_line
from tests.orchestrator.planner.test_request_parsing import LINE

MEMORY = [
    "params_bytes",
    "reference_bytes",
    "grads_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "buffers_bytes",
    "rollout_bytes",
    "unattributed_bytes",
]
PIPELINE = {
    **LINE,
    "id": 7,
    "plan": {"dp": 2, "tp": 2, "pp": 4, "zero": 1, "precision": "bf16", "global_batch_size": 32},
    "cluster": {"device": "a100-80g", "nodes": 2, "devices_per_node": 8},
    "framework": "megatron",
}
SEARCH: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": LINE["cluster"],
    "workload": {"seq_len": 8192, "global_batch_size": 64},
    "framework": "fsdp2",
    "fix": {"tp": 1, "pp": 1, "cp": 1},
    "top": 3,
}


def test_answer_line_has_the_documented_shape() -> None:
    [answer] = api.estimate([LINE])
    assert list(answer)[:12] == [
        "id",
        "ok",
        "problems",
        "fits",
        "memory",
        "step_time_s",
        "step_time_low_s",
        "step_time_high_s",
        "time",
        "tokens_per_s_per_device",
        "tflops_per_device",
        "mfu",
    ]
    assert {"hfu", "bubble_fraction", "comm", "usd_per_billion_tokens", "days"} <= set(answer)
    assert (answer["id"], answer["ok"], answer["problems"]) == ("q1", True, [])
    memory = answer["memory"]
    assert list(memory) == [
        *MEMORY,
        "total_bytes",
        "reserved_bytes",
        "capacity_bytes",
        "stage",
        "per_stage_total_bytes",
    ]
    assert sum(memory[name] for name in MEMORY) == pytest.approx(memory["total_bytes"], abs=8)
    assert memory["capacity_bytes"] == 80 * 2**30 and memory["per_stage_total_bytes"] == [
        memory["total_bytes"]
    ]
    assert set(answer["time"]) == {
        "compute_s",
        "exposed_comm_s",
        "bubble_s",
        "optimizer_s",
        "rollout_s",
        "other_s",
    }
    assert sum(answer["time"].values()) == pytest.approx(answer["step_time_s"])
    assert answer["step_time_low_s"] < answer["step_time_s"] < answer["step_time_high_s"]
    assert set(answer["comm"]) == {"dp_bytes", "tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes"}
    rate = 16 * 8192 / answer["step_time_s"] / 8
    assert answer["tokens_per_s_per_device"] == pytest.approx(rate)
    assert answer["days"] == pytest.approx(1e12 / rate / 8 / 86400)
    assert answer["usd_per_billion_tokens"] == pytest.approx(1e9 / rate / 3600 * 3.0)
    # 6N and full attention on the datasheet's 989.4 dense TFLOP/s
    assert answer["mfu"] == pytest.approx(answer["tflops_per_device"] / 989.4)
    json.dumps(answer, allow_nan=False)


def test_answer_names_the_worst_pipeline_rank() -> None:
    [answer] = api.estimate([PIPELINE])
    memory = answer["memory"]
    assert answer["id"] == 7 and len(memory["per_stage_total_bytes"]) == 4
    assert memory["per_stage_total_bytes"][memory["stage"]] == max(memory["per_stage_total_bytes"])
    assert sum(memory[name] for name in MEMORY) == pytest.approx(memory["total_bytes"], abs=8)
    assert (
        answer["bubble_fraction"] > 0
        and answer["comm"]["pp_bytes"] > 0
        and answer["days"] is not None
    )


def test_a_plan_that_does_not_fit_has_all_numbers() -> None:
    [answer] = api.estimate([{**LINE, "model": "llama3-70b", "plan": {**LINE["plan"], "zero": 0}}])
    assert answer["ok"] and answer["fits"] is False
    assert (
        answer["memory"]["total_bytes"] > answer["memory"]["capacity_bytes"]
        and answer["step_time_s"] > 0
    )


def test_lines_are_answered_in_order_and_independently() -> None:
    lines = [
        PIPELINE,
        parse_json_line("{"),
        LINE,
        {**LINE, "id": None, "plan": {"dp": 3}},
        {**PIPELINE, "id": "b"},
        5,
    ]
    answers = api.estimate(lines)
    assert [each["id"] for each in answers] == [7, None, "q1", None, "b", None]
    assert [each["ok"] for each in answers] == [True, False, True, False, True, False]
    assert set(answers[1]) == {"id", "ok", "fits", "problems"}
    assert answers[3]["problems"][0].keys() == {"field", "message", "hint"}
    for at in (0, 2):
        alone = api.estimate([lines[at]])[0]
        assert alone["memory"] == answers[at]["memory"]
        assert alone["step_time_s"] == pytest.approx(answers[at]["step_time_s"], rel=1e-12)


def test_named_numbers_are_explained_to_the_requested_depth() -> None:
    [plain] = api.estimate([PIPELINE])
    [answer] = api.estimate(
        [PIPELINE], explain=parse_explain_options(["mfu", "send_bytes", "step_time_low_s"], 1)
    )
    result = answer.pop("explained")
    assert answer == plain and list(result) == ["mfu", "send_bytes", "step_time_low_s"]
    assert result["mfu"]["value"] == pytest.approx(plain["mfu"])
    assert result["mfu"]["inputs"] and not any(each["inputs"] for each in result["mfu"]["inputs"])
    assert len(json.dumps(result)) < 20_000
    assert (
        parse_explain_options(False) is None
        and parse_explain_options(None) is None
        and parse_explain_options("mfu") == ExplainOptions(("mfu",))
    )
    for explain, depth in (
        ("beauty", None),
        ([], None),
        (3, None),
        ([{}], None),
        (True, -1),
        (True, "1"),
    ):
        with pytest.raises(BadRequest) as caught:
            parse_explain_options(explain, depth)
        assert caught.value.problems[0].field.startswith("explain")


@pytest.mark.parametrize(
    ("device", "precision", "used"),
    [
        ("v100-32g", "bf16", "fp32 peak, 15.7"),
        ("v100-32g", "fp8", "fp16 peak, 125"),
        ("a100-80g", "fp8", "bf16 peak, 312"),
        ("a100-80g", "bf16", ""),
        ("v100-32g", "fp16", ""),
    ],
)
def test_unsupported_precision_adds_a_note(device: str, precision: str, used: str) -> None:
    cluster = {"device": device, "devices_per_node": 8}
    [answer] = api.estimate(
        [{**LINE, "cluster": cluster, "plan": {"dp": 8, "zero": 3, "precision": precision}}]
    )
    output = [each for each in answer["notes"] if "does not multiply" in each]
    assert (used in output[0] and precision in output[0]) if used else not output
    searched = api.search(
        {
            **SEARCH,
            "cluster": cluster,
            "fix": {"precision": precision, "recompute": "full"},
            "top": 1,
        }
    )
    assert any("does not multiply" in each for each in searched["notes"]) == bool(used)


def test_a_plan_that_exceeds_host_memory_does_not_fit() -> None:
    """ZeRO-Offload stores 12 bytes per parameter on the host: 8.03e9 x 12 / 8 per device."""
    plan = {"dp": 8, "zero": 2, "offload": "optimizer", "precision": "bf16"}
    lines = [
        {**LINE, "framework": "megatron", "plan": plan, "cluster": {**LINE["cluster"], **more}}
        for more in ({}, {"host_gib_per_device": 5}, {"host_gib_per_device": 64})
    ]
    unknown, small, large = api.estimate(lines)
    assert unknown["host"]["host_bytes"] == pytest.approx(8.03e9 * 12 / 8, rel=1e-3)
    assert [each["fits"] for each in (unknown, small, large)] == [True, False, True]
    assert (
        "size is unknown" in unknown["notes"][0]
        and "has 40 GiB" in small["notes"][0]
        and not any("each host" in note.lower() for note in large["notes"])
    )
    requested = {
        **SEARCH,
        "framework": "megatron",
        "fix": {**SEARCH["fix"], "zero": 2, "offload": ["none", "optimizer"]},
    }
    fit = [
        api.search({**requested, "cluster": {**LINE["cluster"], "host_gib_per_device": gib}})["fit"]
        for gib in (5, 64)
    ]
    assert 0 < fit[0] < fit[1]
    [disk] = api.estimate([{**lines[1], "plan": {**plan, "offload": "nvme"}}])
    assert disk["host"]["host_bytes"] == 0 and disk["fits"] and "disks" in disk["notes"][0]


def test_trees_equal_the_numbers_and_end_at_inputs() -> None:
    [plain], [tree] = api.estimate([PIPELINE]), api.estimate([PIPELINE], explain=ExplainOptions())
    pairs = [
        (plain[name], tree[name])
        for name in ("step_time_s", "step_time_low_s", "mfu", "bubble_fraction")
    ]
    pairs += [
        (plain["memory"][name], tree["memory"][name])
        for name in [*MEMORY, "total_bytes", "capacity_bytes"]
    ]
    pairs += [(plain["memory"]["per_stage_total_bytes"], tree["memory"]["per_stage_total_bytes"])]
    pairs += [
        (value, tree[block][name])
        for block in ("time", "comm")
        for name, value in plain[block].items()
    ]
    for value, result in pairs:
        assert set(result) == {"name", "value", "unit", "formula", "inputs", "source"}
        assert result["value"] == pytest.approx(value, rel=1e-9, abs=1)
    seen: set[str] = set()
    waiting = [tree["step_time_s"], tree["memory"]["total_bytes"]]
    while waiting:
        node = waiting.pop()
        assert (
            node["inputs"] or node["formula"] == "given" or node["name"] in seen or node["name"]
        ), node
        if node["inputs"]:
            seen.add(node["name"])
        waiting += node["inputs"]
    assert {"layers", "hidden"} <= _leaves(tree["memory"]["total_bytes"])
    assert "peak_flops" in _leaves(tree["step_time_s"])


def _leaves(tree: dict[str, Any]) -> set[str]:
    below = set().union(*(_leaves(each) for each in tree["inputs"])) if tree["inputs"] else set()
    return below | ({tree["name"]} if tree["formula"] == "given" else set())


def test_a_search_ranks_the_plans_that_fit() -> None:
    answer = api.search(SEARCH)
    assert answer["enumerated"] == answer["legal"] >= answer["fit"] > 0 and answer["seconds"] > 0
    plans = answer["plans"]
    times = [each["step_time_s"] for each in plans[:3]]
    assert times == sorted(times) and all(
        each["fits"] and each["plan"]["tp"] == 1 for each in plans
    )
    assert answer["pareto"] and all(0 <= place < len(plans) for place in answer["pareto"])
    assert answer["rejected"]["memory: does not fit"] == answer["enumerated"] - answer["fit"]
    line = {**LINE, "plan": plans[0]["plan"], "workload": {"seq_len": 8192}}
    [again] = api.estimate([line])
    assert (
        again["step_time_s"] == pytest.approx(times[0], rel=1e-9)
        and again["memory"] == plans[0]["memory"]
    )
    cheap = api.search({**SEARCH, "objective": "memory"})
    assert cheap["plans"][0]["memory"]["total_bytes"] <= min(
        each["memory"]["total_bytes"] for each in plans
    )
    explained = api.search({**SEARCH, "top": 1}, explain=ExplainOptions())
    assert len(explained["plans"]) == 1 and explained["plans"][0]["mfu"]["name"] == "mfu"


def test_a_search_without_fitting_plans_gives_advice() -> None:
    answer = api.search(
        {**SEARCH, "model": "llama3-70b", "fix": {"zero": 0, "offload": "none", "tp": 1, "pp": 1}}
    )
    assert answer["fit"] == 0 and answer["plans"] == [] and answer["closest"]["fits"] is False
    assert answer["advice"] and all(each["message"] for each in answer["advice"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"top": 0}, "top"),
        ({"objective": "beauty"}, "objective"),
        ({"fix": {"tq": 1}}, "fix.tq"),
        ({"fix": 3}, "fix"),
        ({"fixed": {}}, "fixed"),
        ({"workload": {"seq_len": 128}}, "workload"),
        (
            {
                "cluster": {"device": "h100-80g", "nodes": 1000, "devices_per_node": 1000},
                "fix": {"micro_batch_size": 0},
            },
            "fix.micro_batch_size",
        ),
    ],
)
def test_an_invalid_search_is_refused_with_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        api.search({**SEARCH, **change})
    assert field in [item.field for item in caught.value.problems]
    with pytest.raises(BadRequest):
        api.search([])


def test_an_auto_plan_is_chosen() -> None:
    line = {**LINE, "plan": "auto", "workload": {"seq_len": 8192, "global_batch_size": 64}}
    [chosen] = api.estimate([line])
    best = api.search({key: value for key, value in line.items() if key != "plan"} | {"top": 1})[
        "plans"
    ][0]
    assert chosen["ok"] and chosen["step_time_s"] == pytest.approx(best["step_time_s"])
    impossible = {**line, "cluster": {"device": "h100-80g", "devices_per_node": 101}}
    [refused] = api.estimate([impossible])
    assert refused["ok"] is False and refused["problems"][0]["message"]


def test_serving_and_export_answer_or_refuse() -> None:
    requested = {
        "model": "llama3-70b",
        "cluster": LINE["cluster"],
        "prompt_len": 1024,
        "output_len": 256,
    }
    answer = api.serving(requested)
    assert answer["fits"] and answer["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert all(
        math.isfinite(answer[name])
        for name in ("ttft_s", "tpot_s", "tokens_per_s", "max_concurrency")
    )
    # 140 GB of weights need two devices; the rest of the node holds replicas
    assert answer["devices"] == 8 and answer["memory"]["weights_bytes_per_device"] < 75e9
    for wrong in ({"tp": 7}, {"model": "x"}, {"colour": 1}):
        with pytest.raises(BadRequest):
            api.serving({**requested, **wrong})
    for kind in ("torchtitan", "megatron", "deepspeed", "accelerate"):
        assert api.export({**LINE, "plan": {**LINE["plan"], "zero": 1}}, kind).text
    with pytest.raises(BadRequest) as caught:
        api.export(LINE, "jax")
    assert caught.value.problems[0].field == "engine"
