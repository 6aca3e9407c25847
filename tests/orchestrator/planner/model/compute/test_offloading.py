"""Offloaded weights cost the time they travel, and automatic recomputation the time of what it
drops.
"""

from __future__ import annotations

import pytest

from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.plan import ParallelPlan


def table(*plans: dict[str, object], seq_len: int = 4096):
    cluster = ClusterSpec(device="h100-80g", nodes=1, devices_per_node=8)
    common = {"dp": 8, "precision": "bf16", "global_batch_size": 32}
    requests = [
        Request(
            preset("llama3-8b"),
            ParallelPlan.from_dict({**common, **plan}),
            cluster,
            seq_len,
            framework("orrery"),
        )
        for plan in plans
    ]
    return table_of(requests, columns_for(requests))


def test_weights_come_twice_and_gradients_go_once_for_each_micro_batch() -> None:
    total = parameter_count(preset("llama3-8b")).total
    result = table(
        {"offload": "all"},
        {"offload": "all", "zero": 3},
        {"offload": "optimizer"},
        {"offload": "nvme"},
    )
    rate, storage = result["host_link_bytes_per_s"], result["nvme_bytes_per_s"]
    each = total * (2 * result["param_bytes"][0] + result["grad_bytes"][0])
    expected = [4 * each / rate, 4 * each / 8 / rate, 0.0, 4 * each / min(rate, storage)]
    assert result.column("streaming_s") == pytest.approx(expected, rel=1e-3)


def test_offload_is_never_free_and_slower_the_farther_away() -> None:
    kinds = (
        {"zero": 1},
        {"zero": 1, "offload": "optimizer"},
        {"zero": 1, "offload": "all"},
        {"zero": 1, "offload": "nvme"},
    )
    times = table(*kinds).column("step_time_s").tolist()
    assert times == sorted(times) and len(set(times)) == 4
    # what compute cannot hide is seen: whole weights of 16 GB four times a step
    exposed = table(*kinds).column("exposed_comm_s")
    assert exposed[2] > exposed[1]


def test_automatic_recomputation_costs_what_it_does_not_keep() -> None:
    budgets = [None, 2 * 2**30, 8 * 2**30, 2**50]
    auto = [{"zero": 3, "recompute": "auto", "recompute_budget_bytes": each} for each in budgets]
    result = table({"zero": 3, "recompute": "full"}, *auto, {"zero": 3, "recompute": "none"})
    times, bytes_ = result.column("step_time_s"), result.column("total_bytes")
    assert times[1] == pytest.approx(times[0]) and bytes_[1] == pytest.approx(bytes_[0], rel=1e-3)
    assert times[0] >= times[2] > times[3] > times[4] == pytest.approx(times[5])
    assert bytes_[1] <= bytes_[2] < bytes_[3] < bytes_[4]
