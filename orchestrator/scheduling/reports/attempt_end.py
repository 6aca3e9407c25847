"""The end of an attempt: nodes' exits gathered, bystanders ended, the run moved, devices freed.

All of it may be told twice. Does not decide whether a node is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from django.db import transaction

from orchestrator.common import clock
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports.exit_merge import first_cause
from orchestrator.scheduling.reports.presence import presence
from orchestrator.telemetry.outcome import misses_tell

log = logging.getLogger(__name__)


def node_exited(attempt: Attempt, *, node: str, report: Mapping[str, Any]) -> bool:
    """Notes that the attempt is over on one node; True when it is over altogether.

    A failure on one node ends the other nodes' share.
    """
    if attempt.state == "exited":
        return False
    reports = runs.attempt_node_exited(attempt=attempt, node=node, exit=dict(report))
    nodes = {share["node"] for share in attempt.placement}
    if nodes <= set(reports):
        finish(attempt, reports)
        return True
    if any(each.get("class") != "ok" for each in reports.values()):
        dispatch.control(attempt, "kill", nodes=nodes - set(reports))
    return False


def finish(attempt: Attempt, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Ends the attempt by the first cause and frees its devices, in one transaction."""
    exit_class, exit = first_cause(reports)
    with transaction.atomic():
        runs.attempt_exited(attempt=attempt, exit_class=exit_class, exit=exit)
        Allocation.objects.filter(attempt=attempt, released=None).update(released=clock.now())
    presence.forget(str(attempt.fence))
    _judge(attempt, exit_class)
    log.info(
        "Attempt %s of run %s ended: %s, %s",
        attempt.number,
        attempt.run_id,
        exit_class,
        exit.get("reason"),
    )


def _judge(attempt: Attempt, exit_class: str) -> None:
    """Holds the attempt against its prediction. The attempt is over whatever comes of it."""
    try:
        misses_tell(run=attempt.run, attempt=attempt.number, exit_class=exit_class)
    except Exception:
        log.exception(
            "attempt %s of run %s could not be held against its prediction",
            attempt.number,
            attempt.run_id,
        )


def give_up(
    attempt: Attempt, *, exit_class: str, reason: str, nodes: set[str] | None = None
) -> None:
    """The control plane's own word for nodes (default: all) that will not report: lost, or never
    launched.
    """
    for node in sorted(
        nodes if nodes is not None else {share["node"] for share in attempt.placement}
    ):
        if node not in attempt.nodes_exited and attempt.state != "exited":
            node_exited(
                attempt,
                node=node,
                report={"class": exit_class, "reason": reason, "time": clock.now().timestamp()},
            )
            attempt.refresh_from_db()
