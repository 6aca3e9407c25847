"""Order and shares of the policy: team quotas, decayed usage, durations, aging, plan groups."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.ordering.decayed_usage import HALF_LIFE_S, DecayedUsage
from orchestrator.scheduling.ordering.orders import ORDERS
from orchestrator.scheduling.policy import NodeView, Slot, place
from tests.orchestrator.scheduling.test_policy_boundaries import NOW, T, node, placed, run


def test_a_team_quota_counts_the_devices_of_all_its_members_in_all_pools() -> None:
    held = tuple(Slot(i, "cpu", False, 90, "ann", team="vision") for i in range(3))
    nodes = [NodeView("a", "default", held), node("b", 8, pool="other")]
    queue = [
        run(1, 2, 9, pool="other", owner="bob", team="vision"),
        run(2, 1, 8, pool="other", owner="bob", team="vision"),
        run(3, 5, 7, pool="other", owner="cem", team="speech"),
    ]
    decision = place(queue, nodes, NOW, team_quotas={"vision": 4})
    assert [placement.run for placement in decision.placements] == [2, 3]
    assert decision.waits[0].reason == (
        "Waiting for 2 devices: team vision may hold 4 at a time and 3 are in use. "
        "It starts when other runs of the team end."
    )
    decision = place([run(1, 5, team="vision")], nodes, NOW, team_quotas={"vision": 4})
    assert "Request 4 or fewer" in decision.waits[0].reason


def test_a_team_that_used_less_and_a_shorter_run_start_first() -> None:
    usage = DecayedUsage()
    usage.add("vision", "ann", 1e6, T)
    usage.add("speech", "bob", 1e5, T)
    queue = [
        run(1, 4, 90, owner="ann", team="vision"),
        run(2, 4, 80, owner="bob", team="speech"),
        run(3, 4, 70, owner="ann", team="vision", expected_s=60.0),
    ]
    decision = place(queue, [node("a", 4)], NOW, usage=usage)
    assert [placement.run for placement in decision.placements] == [3]
    assert [wait.run for wait in decision.waits] == [2, 1]
    decision = place(queue, [node("a", 4)], NOW, usage=usage, order=ORDERS["fifo"])
    assert [placement.run for placement in decision.placements] == [1]


def test_a_run_that_waits_for_a_day_gains_a_priority_step() -> None:
    queue = [run(1, 4, 1, priority=1), run(2, 4, 86400 * 1.0), run(3, 4, 86399.0)]
    decision = place(queue, [node("a", 4)], NOW)
    assert [placement.run for placement in decision.placements] == [2]
    assert [wait.run for wait in decision.waits] == [1, 3]


def test_a_tensor_parallel_group_stays_on_one_node() -> None:
    nodes = [node("a", 3, 1), node("b", 3, 1)]
    assert placed(place([run(1, 4)], nodes, NOW))
    assert not placed(place([run(1, 4, together=4)], nodes, NOW))


def test_usage_halves_per_half_life_and_integrates_devices_in_use() -> None:
    usage = DecayedUsage()
    usage.add("a", "ann", 100.0, 0.0)
    assert usage.of_team("a", HALF_LIFE_S) == pytest.approx(50.0)
    usage.change("b", "bob", 2, 0.0)
    usage.change("b", "bob", -2, 10.0)
    assert usage.of_person("b", "bob", 10.0) == pytest.approx(20.0, rel=1e-4)
    assert usage.of_team("b", 10.0 + HALF_LIFE_S) == pytest.approx(10.0, rel=1e-4)


def test_a_team_with_twice_the_share_may_use_twice_as_much() -> None:
    usage = DecayedUsage(shares={"a": 2.0, "none": 0.0})
    usage.add("a", "ann", 200.0, 0.0)
    usage.add("b", "bob", 100.0, 0.0)
    assert usage.excess("a", 0.0) == usage.excess("b", 0.0) == 0.0
    usage.add("none", "cem", 1.0, 0.0)
    assert usage.excess("none", 1.0) == 1.0
