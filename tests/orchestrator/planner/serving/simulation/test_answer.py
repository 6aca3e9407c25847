"""Answers of serving simulations: units, limits, measured costs, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.planner import api
from orchestrator.planner.plan_request import BadRequest

H100 = {"device": "h100-80g", "nodes": 1, "devices_per_node": 1}
COSTS = {"step_s": 0.01, "prefill_token_s": 0.0, "decode_s": 0.0}


def simulate(load: dict[str, Any], **more: Any) -> dict[str, Any]:
    lengths = {"prompt": {"mean": 100}, "output": {"mean": 11}, "requests": 60}
    request = {"model": "llama3-8b", "cluster": H100, "load": {**lengths, **load}, **more}
    return api.simulate_serving(request)


def test_an_idle_server_answers_in_the_times_of_its_steps() -> None:
    answer = simulate({"rate": 1.0, "process": "constant"}, step_costs=COSTS)
    assert answer["ttft_s"]["p99"] == pytest.approx(0.01)
    assert answer["tpot_s"]["p99"] == pytest.approx(0.01)
    assert answer["latency_s"]["mean"] == pytest.approx(0.11)
    assert answer["running"] == {"mean": 1.0, "max": 1}
    assert answer["time"]["idle"] == pytest.approx(1 - 60 * 0.11 / answer["seconds"])
    assert answer["step_times"] == "measured" and not answer["saturated"]


def test_numbers_of_a_full_server_reconcile() -> None:
    """Sequences in a step over its duration are tokens/s, without prompts' steps in between."""
    answer = simulate({"clients": 8}, step_costs=COSTS, max_seqs=8)
    steps = answer["seconds"] / answer["step_s"]
    assert answer["tokens_per_s"] * answer["seconds"] == 60 * 11
    assert answer["running"]["mean"] * steps == pytest.approx(60 * 11, rel=0.01)
    assert answer["time"]["idle"] == pytest.approx(0, abs=1e-9)


def test_the_largest_rate_meets_its_limits_and_a_larger_one_does_not() -> None:
    costs = {"step_s": 0.01, "decode_s": 0.001}
    answer = simulate({"rate": 300.0}, step_costs=costs, limits={"tpot_s": 0.02}, rates=[10.0, 5.0])
    search = answer["search"]
    rows = {row["rate"]: row["meets"] for row in search["rows"]}
    assert rows[search["rate"]] and not any(
        meets for rate, meets in rows.items() if rate > search["rate"]
    )
    assert search["replicas"] > 1 and search["devices"] == search["replicas"]
    assert [row["rate"] for row in answer["by_rate"]] == [5.0, 10.0]
    impossible = simulate({"rate": 1.0}, step_costs=COSTS, limits={"tpot_s": 0.005})
    assert impossible["search"]["rate"] is None


def test_a_load_above_the_capacity_is_saturated() -> None:
    answer = simulate({"rate": 1000.0, "requests": 400}, step_costs=COSTS, max_seqs=2)
    assert answer["saturated"] and answer["waiting"]["max"] > 100


def test_separate_prefill_replicas_keep_prompts_out_of_decode_steps() -> None:
    costs = {"step_s": 0.01, "prefill_token_s": 1e-3}
    cluster = {**H100, "devices_per_node": 2}
    split = {"prefill": 1, "decode": 1}
    load = {"rate": 5.0, "requests": 200}
    together = simulate(load, step_costs=costs, cluster=cluster, replicas=2)
    apart = simulate(load, step_costs=costs, cluster=cluster, replicas=1, disaggregated=split)
    assert apart["devices"] == together["devices"] == 2
    # a prompt's step takes 0.11 s: it delays decodes only where both run together
    assert apart["tpot_s"]["p99"] < 0.02 < together["tpot_s"]["p99"]


def test_overloaded_prefill_replicas_saturate_a_deployment() -> None:
    costs = {"step_s": 0.01, "prefill_token_s": 1e-3}
    cluster = {**H100, "devices_per_node": 3}
    split = {"prefill": 1, "decode": 2}
    load = {"rate": 20.0, "requests": 100}  # a prompt takes 0.1 s
    answer = simulate(load, step_costs=costs, cluster=cluster, disaggregated=split)
    assert answer["saturated"] and answer["capacity"] == pytest.approx(10, rel=0.1)
    half = simulate({**load, "rate": 6.0}, step_costs=costs, cluster=cluster, disaggregated=split)
    assert not half["saturated"]


def test_saturation_does_not_depend_on_the_queue_alone() -> None:
    """256 sequences run at a time: a few hundred requests do not queue above the capacity."""
    costs = {"step_s": 0.001, "decode_s": 0.001}
    load = {"output": {"mean": 100}, "requests": 200}
    above, below = (
        simulate({**load, "rate": rate}, step_costs=costs, max_seqs=256) for rate in (11.0, 7.0)
    )
    assert above["saturated"] and not below["saturated"]


def test_replicas_for_a_rate_share_it_evenly() -> None:
    costs = {"step_s": 0.01, "decode_s": 0.001}
    answer = simulate({"rate": 1.0}, step_costs=costs, limits={"tpot_s": 0.02})
    single = answer["search"]["rate"]
    many = simulate({"rate": 10.9 * single}, step_costs=costs, limits={"tpot_s": 0.02})
    assert many["search"]["replicas"] == 11


def test_lengths_count_not_the_unused_lengths_of_an_estimate() -> None:
    request = {"model": "llama-tiny", "cluster": H100, "step_costs": COSTS}
    load = {"rate": 1.0, "prompt": {"mean": 20}, "output": {"mean": 5}, "requests": 20}
    assert api.simulate_serving({**request, "load": load})["requests"] == 20
    measured = {**load, "prompt": {"values": [30, 60]}, "shared_prefix": 40}
    assert api.simulate_serving({**request, "load": measured})["requests"] == 20


def test_predicted_steps_agree_with_the_serving_terms() -> None:
    """One sequence at a time: the roofline of `plans/serving` at batch 1."""
    alone = api.serving(
        {"model": "llama3-8b", "cluster": H100, "prompt_len": 100, "output_len": 11, "batch": 1}
    )
    answer = simulate({"rate": 0.1, "process": "constant"})
    assert answer["tpot_s"]["p50"] == pytest.approx(alone["tpot_s"], rel=0.01)
    # the term reads the whole token table, of which a prompt needs a few rows: 7% of the weights
    assert answer["ttft_s"]["p50"] == pytest.approx(alone["ttft_s"], rel=0.07)


def test_a_larger_spread_of_lengths_waits_longer() -> None:
    load = {"rate": 40.0, "requests": 400}
    equal = simulate(load, step_costs=COSTS, max_seqs=4)
    spread = simulate({**load, "output": {"mean": 11, "cv": 2.0}}, step_costs=COSTS, max_seqs=4)
    assert spread["queue_s"]["p99"] > equal["queue_s"]["p99"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"load": {}}, "load.rate"),
        ({"load": {"rate": 1, "clients": 2}}, "load.rate"),
        ({"load": {"rate": 0}}, "load.rate"),
        ({"load": {"rate": 1, "prompt": {"mean": 9000}}}, "load.prompt"),
        ({"load": {"rate": 1, "prompt": {"min": 9, "max": 8}}}, "load.prompt.min"),
        ({"load": {"rate": 1, "shared_prefix": 5000}}, "load.shared_prefix"),
        ({"load": {"rate": 1, "requests": 5000}, "max_seqs": 4096}, "load.requests"),
        ({"load": {"clients": 4}, "limits": {"ttft_s": 1}}, "limits"),
        ({"load": {"rate": 1}, "limits": {}}, "limits.ttft_s"),
        ({"load": {"rate": 1}, "kv_blocks": 2}, "kv_blocks"),
        ({"load": {"rate": 1}, "pp": 2, "cluster": {**H100, "devices_per_node": 2}}, "pp"),
        ({}, "load"),
    ],
)
def test_refusals_name_the_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        api.simulate_serving({"model": "llama3-8b", "cluster": H100, **wrong})
    problems = {item.field: item for item in refused.value.problems}
    assert field in problems and problems[field].hint
