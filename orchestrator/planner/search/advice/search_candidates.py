"""Changed scenarios to search when no plan fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.planner.plan_request import Scenario
from orchestrator.planner.search.advice.plan_candidates import (
    DOUBLINGS,
)
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.units import GIB
from workers.contracts.specs.cluster import ClusterSpec

ScenarioCandidate = tuple[dict[str, Any], str, Scenario, dict[str, Any]]


def scenario_candidates(
    scenario: Scenario, fix: Mapping[str, Any]
) -> Iterator[Iterator[ScenarioCandidate]]:
    """One iterator per kind of change, from the smallest change to the largest."""
    cluster, work, entry = (
        scenario.cluster,
        scenario.workload,
        scenario.device or scenario.cluster.entry,
    )

    def nodes() -> Iterator[ScenarioCandidate]:
        for number in (cluster.nodes * 2**power for power in range(1, DOUBLINGS + 1)):
            if number <= 2**16:
                wider = ClusterSpec.from_dict({**cluster.to_dict(), "nodes": number})
                free = {name: value for name, value in fix.items() if name != "dp"}
                yield (
                    {"nodes": number},
                    f"Use {number} nodes instead of {cluster.nodes}",
                    replace(scenario, cluster=wider),
                    free,
                )

    def devices() -> Iterator[ScenarioCandidate]:
        for name, other in sorted(
            DEVICES.items(), key=lambda item: (item[1].memory_bytes, item[1].usd_per_hour)
        ):
            if other.memory_bytes > entry.memory_bytes and other.kind == "gpu":
                bigger = ClusterSpec.from_dict({**cluster.to_dict(), "device": name})
                message = (
                    f"Use {name} with {other.memory_bytes / GIB:.0f} GiB instead of {entry.name}"
                )
                yield (
                    {"device": name},
                    message,
                    replace(scenario, cluster=bigger, device=None),
                    dict(fix),
                )

    def sequences() -> Iterator[ScenarioCandidate]:
        for length in (work.seq_len >> power for power in range(1, DOUBLINGS + 1)):
            if length >= 128:
                shorter = replace(scenario, workload=work.model_copy(update={"seq_len": length}))
                yield (
                    {"seq_len": length},
                    f"Sequences of {length} tokens instead of {work.seq_len}",
                    shorter,
                    dict(fix),
                )

    def batches() -> Iterator[ScenarioCandidate]:
        batch = work.global_batch_size or 1
        for number in (cluster.devices * factor for factor in (1, 2, 4)):
            if number != batch:
                other = replace(
                    scenario, workload=work.model_copy(update={"global_batch_size": number})
                )
                yield (
                    {"global_batch_size": number},
                    f"{number} sequences per step instead of {batch}",
                    other,
                    dict(fix),
                )

    def fixed() -> Iterator[ScenarioCandidate]:
        for name in fix:
            free = {key: value for key, value in fix.items() if key != name}
            yield {name: None}, f"{name} not fixed", scenario, free

    yield from (fixed(), devices(), nodes(), sequences(), batches())
