"""The sentences that tell people why a run waits. Pure text: what it needs, what there is, who
holds the rest.

Does not know how decisions are made; a sentence changes only when its facts do, so rows are not
written for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.scheduling.placement.capacity import NodeView
    from orchestrator.scheduling.policy import Waiting

_SHOWN = 3


def back_off(until: float) -> str:
    moment = datetime.fromtimestamp(until, UTC)
    return f"waits until {moment:%H:%M:%S} UTC before its next attempt"


def over_quota(run: Waiting, quota: int, has: int) -> str:
    return (
        f"waits for {_devices(run)}: pool {run.pool} allows {run.owner or 'each person'} {quota} "
        "at a time "
        f"and {has} are in use; it starts when own runs end"
    )


def checkpoint_away(run: Waiting, nodes: Sequence[str]) -> str:
    return (
        f"waits for node {', '.join(nodes)}, which holds its checkpoint and has not been heard "
        "of lately"
    )


def behind(run: Waiting, head: int, free: int) -> str:
    return (
        f"waits for {_devices(run)}: {free} are free in pool {run.pool} but kept for r{head}, "
        "which has waited longer"
    )


def unequal(run: Waiting, free: Sequence[int], *, ever: bool) -> str:
    spread = " + ".join(str(count) for count in sorted(free, reverse=True) if count) or "0"
    if ever:
        return (
            f"waits for {_devices(run)}: pool {run.pool} has them only as {spread}, and torchrun "
            "wants the same number "
            f"of ranks on every node; ask for a number that divides evenly, or add devices"
        )
    return (
        f"waits for {_devices(run)}: enough are free in pool {run.pool}, but as {spread}, and "
        "torchrun wants the same "
        f"number of ranks on every node"
    )


def busy(run: Waiting, free: int, total: int, holders: str) -> str:
    return f"waits for {_devices(run)}: {free} of {total} are free in pool {run.pool}; {holders}"


def holding(holders: Mapping[int, int]) -> str:
    """Who holds how many, the largest first."""
    most = sorted(holders.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"r{holder} holds {count}" for holder, count in most[:_SHOWN]]
    if len(most) > _SHOWN:
        parts.append(f"{len(most) - _SHOWN} more hold {sum(count for _, count in most[_SHOWN:])}")
    return ", ".join(parts)


def no_room(run: Waiting, total: int, nodes: Sequence[NodeView]) -> str:
    away = [node for node in nodes if node.pool == run.pool and not node.usable]
    there = f"pool {run.pool} has {total} in all"
    if away:
        names = ", ".join(f"{node.name} is {node.away}" for node in away[:_SHOWN])
        return f"waits for {_devices(run)}: {there}, since {names}"
    return f"waits for {_devices(run)}: {there}; ask for {total} or fewer, or add a node"


def nowhere(run: Waiting, nodes: Sequence[NodeView]) -> str:
    here = [node for node in nodes if node.pool == run.pool]
    if not here:
        return (
            f"waits for {_devices(run)}: pool {run.pool} has no node; add one, or choose "
            "another pool"
        )
    away = [f"{node.name} is {node.away}" for node in here if not node.usable]
    if len(away) == len(here):
        return (
            f"waits for {_devices(run)}: no node of pool {run.pool} takes work; "
            f"{', '.join(away[:_SHOWN])}"
        )
    kinds = sorted({slot.kind for node in here if node.usable for slot in node.slots})
    return (
        f"waits for {_devices(run)}: pool {run.pool} has only "
        f"{', '.join(kinds) or 'nodes without devices'}"
    )


def _devices(run: Waiting) -> str:
    noun = "device" if run.devices == 1 else "devices"
    return f"{run.devices} {run.device} {noun}" if run.device else f"{run.devices} {noun}"
