"""Real probes on CPU with gloo, and their comparison with a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.contracts.wire.maintenance.preflight import ProbeReference, ProbeValue
from workers.probe import judge, measure, node, report, steps

CPU = torch.device("cpu")


def test_rates_are_measured() -> None:
    flops = measure.matmul_flops(CPU, side=128)
    copied = measure.memory_bytes_per_s(CPU, size=2**20)
    assert 1e6 < flops < 1e14 and 1e6 < copied < 1e13


def test_only_rates_below_the_share_of_their_own_record_are_shortfalls() -> None:
    values = [
        ProbeValue(measure="matmul", device=0, value=69.0),
        ProbeValue(measure="matmul", device=1, value=71.0),
        ProbeValue(measure="all_reduce", ranks=8, value=1.0),  # never measured with 8 ranks
        ProbeValue(measure="memory", device=0, value=2e9),
    ]
    references = [
        ProbeReference(measure="matmul", device=0, value=100.0, samples=5),
        ProbeReference(measure="matmul", device=1, value=100.0, samples=5),
        ProbeReference(measure="all_reduce", ranks=4, value=100.0, samples=5),
        ProbeReference(measure="memory", device=0, value=8e9, samples=3),
    ]
    low = judge.shortfalls(values, references, least_share=0.7)
    assert [(item.measure, item.device) for item in low] == [("matmul", 0), ("memory", 0)]
    assert low[1].message == (
        "Memory bandwidth of device 0 is 2 GB/s, 25% of the node's record of 8 GB/s (median of 3)"
    )


@pytest.mark.parametrize(
    ("results", "exits", "expected"),
    [
        (
            [{"stage": "done"}, {"stage": "matmul", "error": "CUDA error"}],
            [None, 1],
            [("matmul", 5)],
        ),
        ([{"stage": "all_reduce"}, {"stage": "all_reduce"}], [None, None], [("all_reduce", None)]),
        ([{"stage": "done"}, {"stage": "done"}], [0, 0], []),
        ([{"stage": "done"}, {}], [0, -9], [("start", 5)]),
    ],
)
def test_a_rank_that_fails_alone_names_its_device(
    results: list[dict[str, str]], exits: list[int | None], expected: list[object]
) -> None:
    failures = report.failures_of(results, [4, 5], exits)
    assert [(item.measure, item.device) for item in failures] == expected


def test_values_of_a_node() -> None:
    results = [
        {"matmul": 10.0, "memory": 5.0, "all_reduce_node": 3.0, "all_reduce": 2.0},
        {"matmul": 11.0, "memory": 6.0, "all_reduce_node": 2.5, "all_reduce": 2.0},
    ]
    on_gpu = report.values_of(results, [2, 3], world=4, gpu=True)
    assert [(item.measure, item.device, item.ranks, item.value) for item in on_gpu] == [
        ("matmul", 2, 1, 10.0),
        ("matmul", 3, 1, 11.0),
        ("memory", 2, 1, 5.0),
        ("memory", 3, 1, 6.0),
        ("all_reduce_node", None, 2, 2.5),
        ("all_reduce", None, 4, 2.0),
    ]
    on_cpu = report.values_of(results, [2, 3], world=4, gpu=False)
    assert {item.ranks for item in on_cpu if item.device is not None} == {2}


def test_a_nodes_report_has_the_slowest_ranks_rates() -> None:
    def rank(rate: float, host: float) -> dict[str, Any]:
        return {
            "stage": "done",
            "rates": [
                {"measure": "matmul", "setting": "512 x 512 x 512 fp32", "value": rate},
                {"measure": "host", "setting": "operation", "value": host},
            ],
            "steps": [],
        }

    about: dict[str, Any] = {"kind": "cpu", "device": "cpu", "short": True, "load": 0.1}
    report_ = node.merged([rank(2e9, 1e-6), rank(1e9, 2e-6)], [0, 0], seconds=1.0, **about)
    assert [(rate.value, rate.unit) for rate in report_.rates] == [(1e9, "FLOP/s"), (2e-6, "s")]
    assert not report_.problems and report_.ranks == 2
    hung = {"stage": "steps", **{"rates": rank(1e9, 1e-6)["rates"]}}
    late = node.merged([rank(2e9, 1e-6), hung], [0, None], seconds=1.0, **about)
    assert late.problems == ["rank 1 ended at steps: it took too long"] and late.rates
    with pytest.raises(node.ProbeError, match="rank 0 ended at start: exit code 1"):
        node.merged([{}], [1], seconds=1.0, **about)


def test_a_busy_node_is_refused() -> None:
    assert node.busy_reason(0.1, gpu=False) is None
    assert "of" in str(node.busy_reason(0.9, gpu=False))


def test_a_short_probe_measures_rates_and_steps() -> None:
    """One rank, and no time for more than the first step."""
    measured = node.probe_node(seconds=1, ranks=1, device="cpu", gpu=False, short=True, force=True)
    assert {"matmul", "attention", "memory", "host"} <= {rate.measure for rate in measured.rates}
    with pytest.raises(node.ProbeError, match="got work"):
        node.probe_node(
            seconds=9, ranks=1, device="cpu", gpu=False, force=True, keeps_on=lambda: False
        )
    assert steps.run_of(steps.cases(gpu=False, ranks=1, short=True)[0], ranks=1, gpu=False)
