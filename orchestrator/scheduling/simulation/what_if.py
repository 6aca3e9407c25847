"""Applies hypothetical changes to the live queue or fleet: added nodes, a paused team. Pure.

Does not estimate starts (`estimates`) and does not depend on a database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.scheduling.policy import NodeView, QueuedRun, Slot


@dataclass(frozen=True)
class Change:
    """What is different: nodes like the pool's largest one, and a team without runs."""

    pool: str = ""
    add_nodes: int = 0
    pause_team: str = ""


def applied(
    change: Change, queue: Sequence[QueuedRun], nodes: Sequence[NodeView]
) -> tuple[list[QueuedRun], list[NodeView]]:
    """The queue and the nodes after the change.

    A paused team's runs neither wait nor hold devices. Raises ValueError if the pool has no node
    with devices to copy.
    """
    runs, views = list(queue), list(nodes)
    if change.pause_team:
        team = change.pause_team
        runs = [run for run in runs if run.team != team]
        views = [
            replace(
                node,
                slots=tuple(_free(slot) if slot.team == team else slot for slot in node.slots),
            )
            for node in views
        ]
    if change.add_nodes:
        own = [node for node in views if node.pool == change.pool and node.slots]
        if not own:
            raise ValueError(f"pool {change.pool} has no node with devices")
        model = max(own, key=lambda node: (len(node.slots), node.name))
        names = {node.name for node in views}
        number = 0
        for _ in range(change.add_nodes):
            number += 1
            while f"new-{number}" in names:
                number += 1
            views.append(
                NodeView(
                    f"new-{number}",
                    change.pool,
                    tuple(_free(slot) for slot in model.slots),
                    supports=model.supports,
                    windows=tuple(each for each in model.windows if each.whole_pool),
                    place=model.place,
                )
            )
    return runs, views


def _free(slot: Slot) -> Slot:
    return Slot(slot.index, slot.kind, slot.gpu)
