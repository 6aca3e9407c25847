"""Advice: every change is legal, fits by its own prediction, and is a single one."""

from __future__ import annotations

import pytest

from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.plan_request import Scenario, Workload
from orchestrator.planner.search.advice.advise import advise, advise_search
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan


def make_request(
    model: str, device: str, nodes: int, per_node: int, seq_len: int, **plan: object
) -> Request:
    cluster = ClusterSpec(device=device, nodes=nodes, devices_per_node=per_node)
    return Request(
        preset(model), ParallelPlan.from_dict(plan), cluster, seq_len, framework("orrery")
    )


def predicted(request: Request):
    return table_of([request], columns_for([request]))


def test_single_changes_that_make_a_plan_fit() -> None:
    request = make_request("llama3-8b", "h100-80g", 1, 8, 8192, dp=8, precision="bf16")
    assert not predicted(request).column("fits")[0]
    changes = advise(request)
    assert changes
    for change in changes:
        now = change.request
        assert not plan_problems(
            now.plan, model=now.model, seq_len=now.seq_len, devices=now.cluster.devices
        )
        table = predicted(now)
        assert table.column("fits")[0]
        assert table.column("step_time_s")[0] == pytest.approx(change.step_time_s)
        assert table.column("total_bytes")[0] == pytest.approx(change.total_bytes)
        assert change.message.endswith(".") and "GiB" in change.message
        plan, before = now.plan.to_dict(), request.plan.to_dict()
        differ = {
            name for name in plan.keys() | before.keys() if plan.get(name) != before.get(name)
        }
        assert differ <= change.changes.keys()
        document = change.to_dict()
        assert document["plan"] == plan and document["changes"] == change.changes
    # changes of the plan come first, fastest first; other devices come last
    own = [each for each in changes if not {"nodes", "device"} & each.changes.keys()]
    assert changes[: len(own)] == own
    assert [each.step_time_s for each in own] == sorted(each.step_time_s for each in own)
    assert ["zero"] in [list(each.changes) for each in own]


def test_combined_change_if_no_single_one_is_sufficient() -> None:
    request = make_request(
        "llama3-70b", "a100-40g", 2, 8, 8192, dp=16, precision="fp32", micro_batch_size=4
    )
    [change, *_] = advise(request)
    assert len(change.changes) > 1
    assert "no single change is sufficient" in change.message
    assert predicted(change.request).column("fits")[0]


def test_a_plan_that_fits_needs_no_advice() -> None:
    assert advise(make_request("llama-tiny", "h100-80g", 1, 1, 128)) == []


def test_advice_for_a_search_without_fitting_plans() -> None:
    cluster = ClusterSpec(device="rtx4090-24g", nodes=1, devices_per_node=8)
    scenario = Scenario(
        preset("llama3-70b"),
        cluster,
        Workload(seq_len=8192, global_batch_size=16),
        framework("orrery"),
    )
    fix = {"offload": "none"}
    changes = advise_search(scenario, fix)
    assert list(changes[0].changes) == ["offload"]
    nodes = next(each for each in changes if "nodes" in each.changes)
    assert nodes.changes["nodes"] > 1 and nodes.request.cluster.nodes == nodes.changes["nodes"]
    device = next(each for each in changes if "device" in each.changes)
    assert device.request.cluster.device == device.changes["device"] != "rtx4090-24g"
    for change in changes:
        assert predicted(change.request).column("fits")[0]
        assert ": then " in change.message and ", a step takes " in change.message
        assert ("GiB of host memory per device" in change.message) == (
            change.plan.offload != "none"
        )
