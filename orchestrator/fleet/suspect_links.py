"""Pairs of nodes whose link is suspected: their gangs' all-reduce was slow in preflight probes.

A slow gang names no node, so it cordons none. Every pair of its nodes is suspected until a later
gang with both nodes is as fast as their record. Does not depend on who runs on the nodes.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import combinations
from typing import Any, Final, NamedTuple

from orchestrator.common import clock
from orchestrator.common.units import iso
from orchestrator.fleet.models import ProbeResult

WITHIN: Final = timedelta(days=7)
_NEWEST: Final = 4000  # rates that are read
_MOST_NODES: Final = 64  # of a gang; in a larger one a pair says nothing


class Suspicion(NamedTuple):
    """The nodes whose link to this node is suspected, and the newest slow gang of theirs."""

    nodes: list[str]
    run: int
    time: datetime
    bytes_per_s: float

    @property
    def gb_per_s(self) -> float:
        """The rate of the slow gang, in GB/s."""
        return self.bytes_per_s / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The REST representation."""
        return {
            "nodes": self.nodes,
            "run": str(self.run),
            "time": iso(self.time),
            "all_reduce_bytes_per_s": self.bytes_per_s,
        }


class Gang(NamedTuple):
    """One probe of an all-reduce over several nodes; `ok`: not below any node's record."""

    run: int
    time: datetime
    nodes: frozenset[str]
    ok: bool
    bytes_per_s: float


def suspicions() -> dict[str, Suspicion]:
    """`{node: suspicion}` from the probes of the last seven days. One query."""
    rows = ProbeResult.objects.filter(measure="all_reduce", time__gte=clock.now() - WITHIN)
    values = rows.order_by("-id").values_list(
        "run", "attempt", "time", "node__name", "ok", "value"
    )[:_NEWEST]
    gangs: dict[tuple[int, int], Gang] = {}
    for run, attempt, time, name, ok, value in values:
        one = gangs.get((run, attempt), Gang(run, time, frozenset(), True, value))
        gangs[run, attempt] = one._replace(
            nodes=one.nodes | {name},
            ok=one.ok and ok,
            bytes_per_s=min(one.bytes_per_s, value),
        )
    return judge(sorted(gangs.values(), key=lambda gang: gang.time))


def judge(gangs: list[Gang]) -> dict[str, Suspicion]:
    """The suspicions that are left after these gangs, oldest first. Pure."""
    slow: dict[tuple[str, str], Gang] = {}
    for gang in gangs:
        if len(gang.nodes) > _MOST_NODES:
            continue
        for pair in combinations(sorted(gang.nodes), 2):
            if gang.ok:
                slow.pop(pair, None)
            else:
                slow[pair] = gang
    result: dict[str, Suspicion] = {}
    for pair, gang in slow.items():
        for own, other in (pair, pair[::-1]):
            before = result.get(own)
            newest = gang if before is None or gang.time >= before.time else None
            nodes = sorted({*(before.nodes if before else ()), other})
            if newest is not None:
                result[own] = Suspicion(nodes, gang.run, gang.time, gang.bytes_per_s)
            elif before is not None:
                result[own] = before._replace(nodes=nodes)
    return result
