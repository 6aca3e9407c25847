"""Supervisors probe the devices before the ranks start: real measurements with torch and gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.launcher.harness import Node, script

pytestmark = pytest.mark.flow

QUICK = script("print('ran', flush=True)")


def event(node: Node) -> dict[str, Any]:
    data = node.reported("event")
    assert data["type"] == "preflight"
    return dict(data["data"])


def test_a_gang_is_measured_then_starts(node: Node) -> None:
    order = node.order(QUICK, preflight={"least_share": 0.7})
    node.launch(order)
    assert node.exited(order)["class"] == "ok"
    measured = event(node)
    rates = {
        (value["measure"], value.get("device")): value["value"] for value in measured["values"]
    }
    assert set(rates) == {
        ("matmul", 0),
        ("matmul", 1),
        ("memory", 0),
        ("memory", 1),
        ("all_reduce_node", None),
    }
    assert all(rate > 1e5 for rate in rates.values()) and measured["ranks"] == 2
    assert [report["type"] for report in node.reports][:2] == ["launching", "event"]


def test_a_rate_below_the_record_ends_the_attempt_before_its_ranks(node: Node) -> None:
    record = {"measure": "matmul", "device": 0, "ranks": 1, "value": 1e18, "samples": 5}
    order = node.order(QUICK, ranks=1, preflight={"least_share": 0.5, "references": [record]})
    run_dir = node.launch(order)
    ended = node.exited(order)
    assert (ended["class"], ended["cause"]) == ("infrastructure", "preflight")
    assert (
        "Matmul rate of device 0" in ended["reason"]
        and "record of 1e+09 GFLOP/s" in ended["reason"]
    )
    assert event(node)["shortfalls"][0]["reference"] == 1e18
    assert not run_dir.rank(0).exists()


def test_a_probe_that_takes_too_long_is_a_shortfall(node: Node) -> None:
    order = node.order(QUICK, ranks=1, preflight={"least_share": 0.5, "timeout_s": 0.05})
    node.launch(order)
    assert "did not finish in time" in node.exited(order)["reason"]


def test_two_nodes_measure_one_gang(node: Node, tmp_path: Path) -> None:
    other = Node(tmp_path / "other", node.url, "n2")
    first = node.order(QUICK, ranks=1, preflight={"least_share": 0.01})
    first |= {"nodes": 2, "world_size": 2, "rendezvous": {"host": "127.0.0.1"}}
    second = {**first, "node_rank": 1, "rank_offset": 1}
    second["spec"] = other.order(QUICK, ranks=1)["spec"]
    try:
        for each, order in ((node, first), (other, second)):
            each.launch(order)
        for each in (node, other):
            assert each.exited(first)["class"] == "ok"
            measures = sorted(value["measure"] for value in event(each)["values"])
            assert measures == ["all_reduce", "matmul", "memory"]
    finally:
        other.close()
