"""Ends an attempt: collects nodes' exits, ends other nodes, updates the run, frees devices.

All functions are idempotent. Does not decide whether a node is lost.
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
from orchestrator.scheduling.cluster_engines import ends
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports import cordon_after_failures, revocation
from orchestrator.scheduling.reports.exit_merge import first_cause
from orchestrator.scheduling.reports.missing_attempts import presence
from orchestrator.scheduling.reports.silence import liveness
from orchestrator.telemetry.outcome import misses_record
from orchestrator.telemetry.whole_run import measurements_store

log = logging.getLogger(__name__)


def node_exited(attempt: Attempt, *, node: str, report: Mapping[str, Any]) -> bool:
    """Record the attempt's exit on one node; True if all its nodes have exited.

    A failure on one node ends the other nodes' share.
    """
    if attempt.state == "exited":
        return False
    reports = runs.attempt_node_exited(attempt=attempt, node=node, exit=dict(report))
    nodes = {share["node"] for share in attempt.placement}
    if nodes <= set(reports):
        finish(attempt, reports)
        return True
    if any(item.get("class") != "ok" for item in reports.values()):
        dispatch.control(attempt, "kill", nodes=nodes - set(reports))
    return False


def finish(attempt: Attempt, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """End the attempt with the first cause and free its devices, in one transaction.

    An attempt in another engine's job that was stopped from outside waits for the engine's reason.
    """
    first_class, first = first_cause(reports)
    if ends.is_undecided(attempt, first_class):
        return  # the pass over its engine ends it
    exit_class, exit = ends.refined(attempt, first_class, first)
    with transaction.atomic():
        runs.attempt_exited(attempt=attempt, exit_class=exit_class, exit=exit)
        Allocation.objects.filter(attempt=attempt, released=None).update(released=clock.now())
    revocation.remove_leases(str(attempt.fence), {share["node"] for share in attempt.placement})
    presence.forget(str(attempt.fence))
    liveness.forget(str(attempt.fence))
    _compare_with_prediction(attempt, exit_class)
    _judge_nodes(attempt)
    log.info(
        "Attempt %s of run %s ended: %s, %s",
        attempt.number,
        attempt.run_id,
        exit_class,
        exit.get("reason"),
    )


def _judge_nodes(attempt: Attempt) -> None:
    """Cordon nodes with too many failures; errors are logged, because the attempt has ended."""
    try:
        attempt.refresh_from_db()
        cordon_after_failures.cordon_after_failures(attempt)
    except Exception:
        log.exception("The nodes of attempt %s could not be judged", attempt.pk)


def _compare_with_prediction(attempt: Attempt, exit_class: str) -> None:
    """Record missed predictions; failures are logged, because the attempt has ended."""
    try:
        attempt.run.refresh_from_db()
        if attempt.run.ended is not None:
            measurements_store(run=attempt.run)
        misses_record(run=attempt.run, attempt=attempt.number, exit_class=exit_class)
    except Exception:
        log.exception(
            "Attempt %s of run %s could not be compared with its prediction",
            attempt.number,
            attempt.run_id,
        )


def abandon(
    attempt: Attempt,
    *,
    exit_class: str,
    reason: str,
    nodes: set[str] | None = None,
    cause: str = "",
) -> None:
    """Record an exit for nodes (default: all) that will not report: lost, or never launched.

    `cause` is NODE_LOST if the nodes themselves are lost, RUN_STOPPED as in `ends.cause`.
    Supervisors that are alive after all stop their ranks.
    """
    revocation.revoke(str(attempt.fence))
    for node in sorted(
        nodes if nodes is not None else {share["node"] for share in attempt.placement}
    ):
        if node not in attempt.nodes_exited and attempt.state != "exited":
            node_exited(
                attempt,
                node=node,
                report={
                    "class": exit_class,
                    "reason": reason,
                    "time": clock.now().timestamp(),
                    **({"cause": cause} if cause else {}),
                },
            )
            attempt.refresh_from_db()
