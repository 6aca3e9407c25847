"""Placement with topology: exposed communication of GPT-3 on 512 devices, compared with first fit.

A tree of partly used racks: 24 racks of 16 nodes with 8 H100, links between racks four times
oversubscribed. The scheduler's own policy places the gang; the planner computes exposed
communication with the bandwidth that the placement leaves to data groups and to neighbours of the
pipeline.
"""

from __future__ import annotations

import functools
import random
import statistics
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from tests.bench.record import record

RACKS, NODES, DEVICES = 24, 16, 8
OVERSUBSCRIPTION = 4.0
SEEDS = tuple(range(1, 11))
# the planner's choice ("auto") for this model, batch and cluster
PLAN = {
    "dp": 16,
    "tp": 4,
    "pp": 8,
    "zero": 1,
    "precision": "bf16",
    "schedule": "zb1p",
    "virtual_stages": 4,
    "sequence_parallel": True,
    "micro_batch_size": 2,
    "global_batch_size": 1536,
}
REQUEST = {
    "model": "gpt3-175b",
    "plan": PLAN,
    "cluster": {"device": "h100-80g", "nodes": 64, "devices_per_node": DEVICES},
    "workload": {"seq_len": 2048},
    "framework": {"name": "megatron"},
}


def main() -> None:
    pairs = []
    for seed in SEEDS:
        nodes = fleet(seed)
        pairs.append((placed(nodes, tree=True), placed(nodes, tree=False)))
    for factor in (OVERSUBSCRIPTION, 2.0, 8.0):
        times = [(exposed_s(close, factor), exposed_s(first, factor)) for close, first in pairs]
        ratios = [close / first for close, first in times]
        record(
            "topology",
            what="exposed communication, placement in the tree over first fit, GPT-3, 512 devices, "
            f"racks {factor:g}:1",
            value=statistics.median(ratios),
            unit="",
            figure="<= 0.8" if factor == OVERSUBSCRIPTION else "",
            worst=round(max(ratios), 4),
            best=round(min(ratios), 4),
            close_s=round(statistics.median(close for close, _ in times), 4),
            first_fit_s=round(statistics.median(first for _, first in times), 4),
            racks=RACKS,
            nodes_per_rack=NODES,
            plan=PLAN,
        )


def fleet(seed: int) -> list[Any]:
    """The nodes of all racks; in each rack a random part is in use."""
    from orchestrator.scheduling.policy import NodeView, Slot

    rng = random.Random(seed)
    nodes = []
    for rack in range(RACKS):
        used = rng.randint(NODES // 4, NODES - 1)
        taken = set(rng.sample(range(NODES), used))
        for number in range(NODES):
            run = 1000 + rack if number in taken else None
            slots = tuple(Slot(index, "h100-80g", True, run) for index in range(DEVICES))
            name = f"r{rack:02}-n{number:02}"
            nodes.append(NodeView(name, "default", slots, place=(f"rack-{rack:02}",)))
    return nodes


def placed(nodes: list[Any], *, tree: bool) -> list[str]:
    """Names of the nodes in the order of their ranks; without the tree the first that fit."""
    from dataclasses import replace

    from orchestrator.planner.api import estimate
    from orchestrator.scheduling.policy import QueuedRun, place

    views = nodes if tree else [replace(node, place=()) for node in nodes]
    [answer] = estimate([REQUEST])
    volumes = answer["comm"]
    run = QueuedRun(
        run=1,
        devices=512,
        pool="default",
        queued_at=0.0,
        together=PLAN["tp"],
        stages=PLAN["pp"],
        pipeline_close=volumes["pp_bytes"] > volumes["dp_bytes"],
    )
    decision = place([run], views, datetime.fromtimestamp(100.0, UTC))
    return [share.node for share in decision.placements[0].shares]


def exposed_s(names: list[str], factor: float) -> float:
    """Exposed communication of a step in seconds, of ranks in this order of nodes."""
    from workers.contracts.catalog.devices import device

    rate = device("h100-80g").inter_node_gb_per_s
    per_stage = len(names) // PLAN["pp"]
    stages = [names[start : start + per_stage] for start in range(0, len(names), per_stage)]
    rings = [edge for stage in stages for edge in pairwise([*stage, stage[0]])]
    hops = [edge for left, right in pairwise(stages) for edge in zip(left, right, strict=True)]
    data, pipeline = (rate * slowest(edges, names, factor) for edges in (rings, hops))
    at_pipeline, at_data = (terms(each) for each in (pipeline, data))
    return at_pipeline["exposed"] - at_pipeline["data"] + at_data["data"]


def slowest(edges: list[tuple[str, str]], names: list[str], factor: float) -> float:
    """Share of a link's rate that the slowest of these simultaneous transfers has.

    Each node sends at its rate. A rack's uplink carries its nodes' rates over `factor`; the gang
    has the part of its nodes, shared by the transfers that leave the rack.
    """
    rack = {name: name.partition("-")[0] for name in names}
    own: dict[str, int] = {}
    for name in names:
        own[rack[name]] = own.get(rack[name], 0) + 1
    leaving: dict[str, int] = {}
    for left, right in edges:
        if rack[left] != rack[right]:
            leaving[rack[left]] = leaving.get(rack[left], 0) + 1
    shares = [own[each] / (factor * count) for each, count in leaving.items()]
    return min([1.0, *shares])


@functools.cache
def terms(rate: float) -> dict[str, float]:
    """Exposed communication, and the part of data ranks, at this bandwidth between nodes."""
    from orchestrator.planner.api import estimate
    from orchestrator.planner.explain import ExplainOptions

    line = REQUEST | {"cluster": {**REQUEST["cluster"], "inter_node_gb_per_s": rate}}  # type: ignore[dict-item]
    [answer] = estimate([line])
    [tree] = estimate([line], explain=ExplainOptions(("stage_dp_exposed_s",), 0))
    value = tree["explained"]["stage_dp_exposed_s"]["value"]
    data = max(value) if isinstance(value, list) else value
    return {"exposed": answer["time"]["exposed_comm_s"], "data": data}


if __name__ == "__main__":
    main()
