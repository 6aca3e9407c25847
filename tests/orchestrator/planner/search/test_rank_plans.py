"""The search matches single plans; ranking and front match all plans."""

from __future__ import annotations

import random

import numpy as np
import pytest

from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import explain
from orchestrator.planner.plan_request import Scenario, Workload
from orchestrator.planner.search import rank_plans as searching
from orchestrator.planner.search.axes import build_axes
from orchestrator.planner.search.enumeration import enumerate_plans
from orchestrator.planner.search.pareto import undominated
from orchestrator.planner.search.rank_plans import rank_plans
from tests.orchestrator.planner.search.test_enumeration import legal_cells
from workers.contracts.base import Refused
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan

CALIBRATED = "calibrated"
TERMS = (
    "total_bytes",
    "fits",
    "step_time_s",
    "usd_per_billion_tokens",
    "compute_s",
    "exposed_comm_s",
    "bubble_s",
    "optimizer_s",
    "dp_bytes",
    "tp_bytes",
    "pp_bytes",
    "cp_bytes",
    "ep_bytes",
    "mfu",
    "hfu",
)


def make_scenario(
    model: str | ModelSpec,
    device: str = "h100-80g",
    nodes: int = 4,
    per_node: int = 8,
    *,
    seq_len: int = 2048,
    batch: int = 96,
    name: str = "orrery",
) -> Scenario:
    cluster = ClusterSpec(device=device, nodes=nodes, devices_per_node=per_node)
    work = Workload(seq_len=seq_len, global_batch_size=batch, tokens=1e9)
    return Scenario(
        model if isinstance(model, ModelSpec) else preset(model), cluster, work, framework(name)
    )


# layers that route and layers that do not, in an order that no two pipelines cut alike
MIXED = ModelSpec.from_dict(
    {
        "layers": 13,
        "hidden": 512,
        "heads": 8,
        "ffn": 2048,
        "vocab": 32000,
        "max_seq_len": 4096,
        "moe": {"experts": 16, "top_k": 2, "expert_ffn": 1024, "first_dense_layers": 3, "every": 2},
    }
)


def parameters_for(scenario: Scenario, calibration: Calibration | None = None):
    return columns_for([scenario.request(ParallelPlan())], calibration)


def make_calibration(scenario: Scenario) -> Calibration:
    """Every plan takes a third longer than predicted, tensor parallel ones even longer."""
    lines = []
    for tp, micro in ((1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (8, 4)):
        plan = ParallelPlan(
            dp=32 // tp,
            tp=tp,
            zero=1,
            precision="bf16",
            micro_batch_size=micro,
            global_batch_size=128,
        )
        request = scenario.request(plan)
        predicted = float(table_of([request], columns_for([request])).column("step_time_s")[0])
        lines.append(
            {
                "model": scenario.model.to_dict(),
                "plan": plan.to_dict(),
                "cluster": scenario.cluster.to_dict(),
                "workload": {"seq_len": scenario.workload.seq_len},
                "framework": scenario.framework.name,
                "measured": {"step_time_s": predicted * 1.3 * (1.2 if tp > 1 else 1)},
            }
        )
    return fit(lines)


SCENARIOS = {
    "dense": (make_scenario("gpt3-175b"), {}),
    "experts, several precisions": (
        make_scenario("mixtral-8x7b", name="megatron", seq_len=4096),
        {"precision": ["bf16", "fp8", "fp32"]},
    ),
    "latent attention": (
        make_scenario("deepseek-v2", nodes=8, seq_len=4096, name="fsdp2"),
        {"tp": [1, 4], "pp": [1, 2, 8, 16]},
    ),
    "every other layer": (
        make_scenario(MIXED, nodes=6, per_node=4),
        {"zero": [0, 1, 3], "recompute": ["none", "full"]},
    ),
    "fewer devices": (
        make_scenario("llama2-13b", "a100-80g", nodes=2),
        {"devices": "any", "prefetch_layers": [0, 3]},
    ),
    "given layers": (
        make_scenario("llama-tiny", nodes=1),
        {"pp": 2, "stage_layers": [2, 3], "schedule": "1f1b"},
    ),
    CALIBRATED: (make_scenario("llama2-7b", seq_len=4096), {"offload": ["none", "all"]}),
    "cpu": (
        make_scenario("llama-tiny", "cpu", nodes=1, per_node=4, seq_len=128, batch=16),
        {"precision": ["fp32", "bf16"]},
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_grid_matches_single_plans(name: str) -> None:
    scenario, fix = SCENARIOS[name]
    calibration = make_calibration(scenario) if name == CALIBRATED else None
    parameters, batch = parameters_for(scenario, calibration), scenario.workload.global_batch_size
    assert (float(parameters["correction_runs"]) > 0) == (name == CALIBRATED)
    chosen = build_axes(fix, scenario.cluster, scenario.cluster.entry)
    space = enumerate_plans(
        scenario.model, scenario.cluster, scenario.workload.seq_len, batch, chosen
    )
    parts = list(space.parts(4096))
    draw = random.Random(name)
    requests, reported = [], {term: [] for term in TERMS}
    for part, table in searching._tables(
        scenario, chosen, draw.sample(parts, min(len(parts), 25)), parameters, batch
    ):
        some = draw.sample(legal_cells(part), min(part.size, 40))
        requests += [
            searching._request(scenario, chosen, part.fields(index), batch) for index in some
        ]
        for term in TERMS:
            reported[term] += np.broadcast_to(table[term], part.shape).reshape(-1)[some].tolist()
    singles = table_of(requests, parameters)
    for term in TERMS:
        np.testing.assert_allclose(
            reported[term], singles.column(term), rtol=1e-9, atol=1e-12, err_msg=term
        )
    for row in draw.sample(range(len(requests)), min(len(requests), 12)):
        alone = table_of([requests[row]], parameters)
        for term in ("total_bytes", "step_time_s"):
            assert explain(alone, term, depth=0).value == pytest.approx(
                reported[term][row], rel=1e-9
            )


def every(scenario: Scenario, fix: dict[str, object]):
    chosen = build_axes(fix, scenario.cluster, scenario.cluster.entry)
    batch = scenario.workload.global_batch_size
    space = enumerate_plans(
        scenario.model, scenario.cluster, scenario.workload.seq_len, batch, chosen
    )
    requests = [
        searching._request(scenario, chosen, block.fields(index), batch)
        for block in space.blocks
        for index in legal_cells(block)
    ]
    return requests, table_of(requests, parameters_for(scenario))


@pytest.mark.parametrize("objective", ["time", "cost", "memory"])
def test_ranking_and_front_match_all_plans(objective: str) -> None:
    scenario, fix = (
        make_scenario("llama3-8b", nodes=1, seq_len=8192, batch=16),
        {"offload": ["none", "optimizer"], "devices": [4, 8], "zero": 2, "cp": 1},
    )
    result = rank_plans(
        scenario, fix=fix, parameters=parameters_for(scenario), objective=objective, top=15
    )
    requests, table = every(scenario, fix)
    fits = table.column("fits").astype(bool)
    assert (result.enumerated, result.legal, result.fit) == (
        len(requests),
        len(requests),
        int(fits.sum()),
    )
    assert result.rejected["memory: does not fit"] == int((~fits).sum())
    name = {"time": "step_time_s", "cost": "usd_per_billion_tokens", "memory": "total_bytes"}[
        objective
    ]
    values, best = table.column(name), {}
    for row in np.flatnonzero(fits)[np.argsort(values[fits], kind="stable")]:
        plan = requests[row].plan.to_dict() | {"devices": requests[row].cluster.devices}
        for variant in ("virtual_stages", "prefetch_layers", "dp_replicate"):
            plan.pop(variant, None)
        best.setdefault(tuple(plan.items()), values[row])
    np.testing.assert_allclose(
        result.table.column(name)[:15], sorted(best.values())[:15], rtol=1e-9
    )
    columns = [
        table.column(each)[fits]
        for each in ("step_time_s", "usd_per_billion_tokens", "total_bytes", "devices")
    ]
    front = {tuple(float(column[row]) for column in columns) for row in undominated(columns)}
    shown = [
        result.table.column(each)
        for each in ("step_time_s", "usd_per_billion_tokens", "total_bytes", "devices")
    ]
    reported = {tuple(float(column[row]) for column in shown) for row in result.pareto}
    assert len(reported) >= 2
    for point in reported:
        assert any(np.allclose(point, other, rtol=1e-9) for other in front)
    for request in result.requests:
        scenario_devices = request.cluster.devices
        assert not plan_problems(
            request.plan, model=scenario.model, seq_len=8192, devices=scenario_devices
        )


def test_the_smallest_plan_is_returned_if_none_fits() -> None:
    scenario = make_scenario("gpt3-175b", "rtx4090-24g", nodes=1)
    fix = {"offload": "none", "recompute": "full"}
    result = rank_plans(scenario, fix=fix, parameters=parameters_for(scenario))
    requests, table = every(scenario, fix)
    assert result.fit == 0 and result.plans == [] and result.enumerated == len(requests) > 1000
    smallest = table_of([result.closest], parameters_for(scenario)).column("total_bytes")[0]
    assert smallest == pytest.approx(table.column("total_bytes").min(), rel=1e-9)


@pytest.mark.parametrize(
    ("scenario", "fix", "field"),
    [
        (make_scenario("llama3-8b"), {"tp": 3}, "fix.tp"),
        (make_scenario("llama3-8b"), {"ep": 2}, "fix.ep"),
        (make_scenario("llama3-8b"), {"dp": 3}, "fix.dp"),
        (make_scenario("llama3-8b"), {"tp": 8, "pp": 8}, "fix.tp"),
        (make_scenario("llama3-8b", seq_len=2047), {"cp": 2}, "fix.cp"),
        (
            make_scenario("llama3-8b", batch=96),
            {"micro_batch_size": 64},
            "workload.global_batch_size",
        ),
        (make_scenario("gpt3-175b", seq_len=4096), {}, "seq_len"),
        (make_scenario("llama3-8b"), {"pp": 64, "virtual_stages": 2, "schedule": "zb1p"}, "fix.pp"),
    ],
)
def test_no_legal_plan_gives_a_reason(
    scenario: Scenario, fix: dict[str, object], field: str
) -> None:
    result = rank_plans(scenario, fix=fix, parameters=parameters_for(scenario))
    assert result.enumerated == 0 and result.plans == []
    assert field in [each.field for each in result.problems]
    assert all(each.message and each.hint for each in result.problems)


def test_a_suggested_degree_divides_the_devices_with_the_others() -> None:
    scenario = make_scenario("llama3-8b", nodes=1)
    for fix, tries in (
        ({"pp": 64}, "pp 8"),
        ({"pp": 64, "tp": 2}, "pp 4"),
        ({"tp": 3, "pp": 8}, "tp 1"),
    ):
        [first, *_] = rank_plans(scenario, fix=fix, parameters=parameters_for(scenario)).problems
        assert first.hint == f"Use {tries}."
        name, degree = tries.split()
        assert (
            rank_plans(
                scenario, fix={**fix, name: int(degree)}, parameters=parameters_for(scenario)
            ).enumerated
            > 0
        )


def test_a_search_requires_a_batch_and_a_known_objective() -> None:
    scenario = make_scenario("llama3-8b")
    with pytest.raises(Refused, match="not an objective"):
        rank_plans(scenario, parameters=parameters_for(scenario), objective="speed")
    unbound = Scenario(scenario.model, scenario.cluster, Workload(seq_len=128), scenario.framework)
    with pytest.raises(Refused, match="number of sequences per step"):
        rank_plans(unbound, parameters=parameters_for(scenario))
