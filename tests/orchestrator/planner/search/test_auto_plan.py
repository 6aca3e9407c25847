"""Auto plans: the fastest allowed plan that fits, deterministically."""

from __future__ import annotations

import pytest

from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.plan_request import Scenario, Workload
from orchestrator.planner.search.auto_plan import choose_plan, resolve_auto
from workers.contracts.base import Refused
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan

# plain data parallel with any ZeRO stage, as an engine without the other axes runs
DATA_PARALLEL = {
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "offload": "none",
    "recompute": ["none", "full"],
    "dp_replicate": None,
    "precision": ["fp32", "bf16"],
    "prefetch_layers": None,
}


def make_scenario(
    model: str, device: str, nodes: int, per_node: int, seq_len: int, batch: int | None
) -> Scenario:
    cluster = ClusterSpec(device=device, nodes=nodes, devices_per_node=per_node)
    return Scenario(
        preset(model),
        cluster,
        Workload(seq_len=seq_len, global_batch_size=batch),
        framework("orrery"),
    )


def test_the_fastest_data_parallel_plan_is_chosen() -> None:
    scenario = make_scenario("llama-15m", "h100-80g", 1, 4, 512, 64)
    choice = resolve_auto(scenario, allowed=DATA_PARALLEL)
    plan = choice.plan
    assert choice.fits and plan is not None
    assert (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.offload, plan.precision) == (
        4,
        1,
        1,
        1,
        1,
        "none",
        "bf16",
    )
    assert choice.how.startswith("The fastest of") and choice.how.endswith(".")
    requests = [
        scenario.request(
            ParallelPlan(
                dp=4,
                zero=zero,
                recompute=recompute,
                precision="bf16",
                micro_batch_size=micro,
                global_batch_size=64,
            )
        )
        for zero in range(4)
        for recompute in ("none", "full")
        for micro in (1, 2, 4, 8, 16)
    ]
    table = table_of(requests, columns_for(requests))
    fastest = table.column("step_time_s")[table.column("fits").astype(bool)].min()
    assert choice.step_time_s == pytest.approx(fastest)
    assert resolve_auto(scenario, allowed=DATA_PARALLEL) == choice


def test_a_model_too_large_to_replicate_is_sharded() -> None:
    choice = resolve_auto(
        make_scenario("llama3-8b", "h100-80g", 1, 8, 4096, 64), allowed=DATA_PARALLEL
    )
    assert choice.fits and choice.plan is not None
    assert choice.plan.zero >= 1 and choice.plan.dp == 8


def test_a_missing_batch_is_chosen() -> None:
    scenario = make_scenario("llama-tiny", "cpu", 1, 2, 64, None)
    choice = resolve_auto(scenario, allowed={**DATA_PARALLEL, "dp": 2})
    assert choice.fits and choice.plan is not None
    assert choice.plan.dp == 2 and choice.plan.global_batch_size % 2 == 0
    assert "sequences per step" in choice.how


def test_fixed_values_hold_and_unsupported_ones_are_refused() -> None:
    scenario = make_scenario("llama-15m", "h100-80g", 1, 4, 512, 64)
    choice = resolve_auto(scenario, fix={"zero": 2, "micro_batch_size": 4}, allowed=DATA_PARALLEL)
    assert choice.plan is not None and (choice.plan.zero, choice.plan.micro_batch_size) == (2, 4)
    with pytest.raises(Refused) as refused:
        resolve_auto(scenario, fix={"tp": 2}, allowed=DATA_PARALLEL)
    assert refused.value.field == "plan.tp"


def test_no_plan_fits_and_no_plan_is_legal() -> None:
    choice = resolve_auto(
        make_scenario("llama3-70b", "rtx4090-24g", 1, 2, 4096, 2), allowed=DATA_PARALLEL
    )
    assert not choice.fits and choice.plan is not None and "None of" in choice.how
    result = choose_plan(make_scenario("llama3-8b", "h100-80g", 1, 8, 8192, 3))
    assert isinstance(result, ParallelPlan)
    assert not plan_problems(result, model=preset("llama3-8b"), seq_len=8192, devices=8)
    odd = choose_plan(make_scenario("gpt2-124m", "h100-80g", 1, 7, 1023, 5))
    assert isinstance(odd, ParallelPlan) or odd[0].message


def test_the_fastest_supported_plan_is_chosen() -> None:
    scenario = make_scenario("llama3-8b", "h100-80g", 1, 8, 4096, 64)
    best = resolve_auto(scenario).plan
    assert best is not None
    second = resolve_auto(scenario, runs=lambda plan: plan != best)
    assert second.plan not in (None, best) and second.fits
    none = resolve_auto(scenario, runs=lambda plan: False)
    assert none.plan is None and "engine does not support any" in none.problems[0].message
