"""What a person should know before taking a plan: another algorithm, a wider precision, memory that
nobody told.

Reads plans and what was predicted of them; knows no formula and ranks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.terms import Table
from workers.contracts.catalog.devices import GIB


def of_plans(requests: Sequence[Request], table: Table) -> list[list[str]]:
    """Sentences on each plan, as they stand in its answer."""
    holds = table.column("host_bytes")
    return [
        [
            each
            for each in (
                _precision(request),
                _host(request, float(held)),
                _stale(request),
                _disk(request),
            )
            if each
        ]
        for request, held in zip(requests, holds, strict=True)
    ]


def warnings(ranked: Sequence[Request], table: Table | None) -> list[str]:
    """Sentences on ranked plans, best first, which they name by their rank; `table` holds them and
    perhaps more.
    """
    if table is None or not ranked:
        return []
    notes = []
    stale = [
        str(place) for place, each in enumerate(ranked, 1) if each.plan.schedule == "pipedream"
    ]
    if stale:
        which = ", ".join(stale[:6]) + (" and others" if len(stale) > 6 else "")
        notes.append(
            f"Number {which}: pipedream updates weights with stale gradients, which trains "
            "differently from all other "
            "schedules; fix schedule to leave it out."
        )
    holds = table.column("host_bytes")
    for place, (request, held) in enumerate(zip(ranked, holds, strict=False), 1):
        if request.cluster.host_gib_per_device is None and held * _on_node(request) >= GIB:
            notes.append(
                f"Number {place} keeps {_of_node(request, float(held))} GiB of states in the "
                "memory of each host, "
                "which the catalogue does not know: that a plan fits is said of the devices "
                f"alone. {_SAY_HOST}"
            )
            break
    return [*dict.fromkeys(filter(None, map(_precision, ranked))), *notes]


_SAY_HOST = "Say host_gib_per_device of the cluster to have it checked."


def _precision(request: Request) -> str:
    """Empty where the device multiplies in the plan's precision."""
    asked, entry = request.plan.precision, request.entry
    used = entry.runs_at(asked)
    if used == asked:
        return ""
    message = (
        f"{entry.name} does not multiply in {asked}: time and MFU are counted at its {used} peak, "
    )
    return (
        f"{message}{entry.peak(used):g} TFLOP/s, which is the most that this plan can reach there."
    )


def _host(request: Request, held: float) -> str:
    if held * _on_node(request) < GIB:  # no host lacks that
        return ""
    if request.entry.kind == "cpu":
        return "On a CPU the device is the host: what is offloaded stays in the same memory."
    all_, has = _of_node(request, held), request.cluster.host_gib_per_device
    if has is None:
        return (
            f"It keeps {all_} GiB of states in the memory of each host, which nobody told: that "
            "it fits is said of the "
            f"devices alone. {_SAY_HOST}"
        )
    if held > has * GIB:
        room = has * _on_node(request)
        return (
            f"Each host would have to hold {all_} GiB of states and has {room:,.0f} GiB for them."
        )
    return ""


def _disk(request: Request) -> str:
    if request.plan.offload != "nvme":
        return ""
    return "All its states lie on each node's disks, whose size nobody told."


def _stale(request: Request) -> str:
    if request.plan.schedule != "pipedream" or request.plan.pp == 1:
        return ""
    return (
        "pipedream updates weights with stale gradients, which trains differently from all "
        "other schedules."
    )


def _of_node(request: Request, held: float) -> str:
    return f"{held * _on_node(request) / GIB:,.0f}"


def _on_node(request: Request) -> int:
    return min(request.plan.world_size, request.cluster.devices_per_node)
