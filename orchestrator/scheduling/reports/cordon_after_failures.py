"""Which nodes an attempt failed on, and the cordon of a node after failures in a row.

A node counts only for failures that are its own: of the class infrastructure or lost, first on this
node, and not of a run that failed the same way elsewhere. Does not place runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.conf import settings

from orchestrator.common import clock
from orchestrator.fleet import cordoning, cordons
from orchestrator.fleet.models import Cordon, Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from workers.contracts.exit_classes import ExitClass

log = logging.getLogger(__name__)

CLASSES: Final = (ExitClass.INFRASTRUCTURE, ExitClass.LOST)
# the ranks worked until the program, the user or the scheduler ended them
_WORKED: Final = (
    ExitClass.OK,
    ExitClass.USER_ERROR,
    ExitClass.OUT_OF_MEMORY,
    ExitClass.NUMERICS,
)
_READ: Final = 50  # newest attempts of a node


class EndedAttempt(NamedTuple):
    """An attempt that ended on a node."""

    run: int
    exit_class: str
    nodes: frozenset[str]  # where it failed
    reason: str


def culprits(placement: Sequence[Mapping[str, Any]], exit: Mapping[str, Any]) -> set[str]:
    """The nodes that an attempt failed on: the one of its first cause, else all."""
    node = exit.get("node")
    return {str(node)} if node else {str(share["node"]) for share in placement}


def failures_in_a_row(
    node: str, ended: Iterable[EndedAttempt], elsewhere: set[int]
) -> list[EndedAttempt]:
    """The node's own failures, newest first, until an attempt that worked.

    `ended` are its attempts, newest first; `elsewhere` are runs that failed on other nodes too.
    """
    row = []
    for attempt in ended:
        if attempt.exit_class in _WORKED:
            break
        if attempt.exit_class in CLASSES and node in attempt.nodes and attempt.run not in elsewhere:
            row.append(attempt)
    return row


def cordon_after_failures(attempt: Attempt) -> list[Cordon]:
    """Cordon the nodes that this ended attempt failed on, if it is one failure too many."""
    if attempt.exit_class not in CLASSES or not settings.ENV.cordon_failures:
        return []
    created = []
    for name in sorted(culprits(attempt.placement, attempt.exit or {})):
        node = Node.objects.filter(name=name).first()
        if node is not None and (cordon := _judge(node, attempt)) is not None:
            created.append(cordon)
    return created


def _judge(node: Node, attempt: Attempt) -> Cordon | None:
    if cordons.open_cordons(node=node, device=None).exists():
        return None
    since = clock.now() - timedelta(seconds=settings.ENV.cordon_window_s)
    last = cordons.cordons_of(node=node).exclude(lifted=None).order_by("-lifted").first()
    if last is not None and last.lifted is not None:  # an operator has judged what was before
        since = max(since, last.lifted)
    matches = _ended_on(node.name, since)
    row = failures_in_a_row(node.name, matches, _failed_elsewhere(node.name, matches, since))
    if len(row) < settings.ENV.cordon_failures:
        return None
    if cordoning.automatic_limit_reached(node):
        log.warning(
            "Node %s had %d infrastructure failures in a row but is not cordoned: too little of "
            "the fleet would be left",
            node.name,
            len(row),
        )
        return None
    reason = f"{len(row)} infrastructure failures in a row; the last: {row[0].reason}"
    data = {"failures": len(row), "runs": sorted({str(ended.run) for ended in row})}
    cordon = cordoning.cordon_create(
        node=node, cause=Cordon.Cause.FAILURES, reason=reason, data=data
    )
    if cordon is not None:
        log.warning("Node %s is cordoned: %s", node.name, reason)
        runs.event_record(
            run=attempt.run,
            type="node_cordoned",
            data={"node": node.name, "reason": cordon.reason, **data},
            attempt=attempt.number,
            origin=f"cordon/{cordon.pk}",
        )
    return cordon


def _ended_on(node: str, since: datetime) -> list[EndedAttempt]:
    rows = Attempt.objects.filter(shares__node=node, ended__gte=since).order_by("-ended", "-id")
    return [
        EndedAttempt(run, exit_class, frozenset(culprits(placement, exit or {})), _reason(exit))
        for run, exit_class, placement, exit in rows.values_list(
            "run_id", "exit_class", "placement", "exit"
        )[:_READ]
    ]


def _failed_elsewhere(node: str, matches: list[EndedAttempt], since: datetime) -> set[int]:
    rows = Attempt.objects.filter(
        run__in={ended.run for ended in matches}, exit_class__in=CLASSES, ended__gte=since
    )
    return {
        run
        for run, placement, exit in rows.values_list("run_id", "placement", "exit")
        if node not in culprits(placement, exit or {})
    }


def _reason(exit: Mapping[str, Any] | None) -> str:
    return str((exit or {}).get("reason") or "no reason was reported")
