"""Periodic checks: silent nodes, missing attempts, orders to repeat, requests to escalate.

An unreachable node has not failed: its attempts end only when it is lost. Does not place runs.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from orchestrator.common import clock
from orchestrator.fleet import services as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports import attempt_end, multi_node_hangs
from orchestrator.scheduling.reports.presence import Presence, presence
from workers.contracts.wire.node_messages import AttemptState

log = logging.getLogger(__name__)

REPEAT_S = 15.0  # orders without effect are repeated
MISSING_S = 20.0  # heartbeats of a node lack an attempt placed on it
STRAGGLER_S = 60.0  # after the other nodes of the attempt have exited
ESCALATE_S = 10.0  # after the grace period, before a request becomes a kill
PAUSE_GRACE_S = 60.0  # a pause or preemption waits for a step and a checkpoint


def reap(*, now: datetime | None = None, known: Presence | None = None) -> int:
    """Check all nodes and open attempts once; returns the number of attempts that it ended."""
    now, known = now or clock.now(), known or presence
    heard_since = now - timedelta(seconds=time.monotonic() - known.since)
    silent = fleet.mark_silent(now=now, listening_since=heard_since)
    for node in silent.lost:
        log.warning("Node %s is lost: no heartbeat for %.0f s", node.name, settings.ENV.node_lost_s)
    nodes = {node.name: node for node in Node.objects.all()}
    ended = 0
    alive = (
        Attempt.objects.exclude(state=AttemptState.EXITED)
        .exclude(run__kind="external")
        .select_related("run")
    )
    for attempt in alive.order_by("id"):
        try:
            ended += _check(attempt, nodes, now, known)
        except Exception:
            log.exception("Attempt %s could not be checked; the next pass retries", attempt.pk)
    multi_node_hangs.record_due()
    for run in runs.external_silent(now=now):
        message = f"The program sent nothing for {settings.ENV.external_silent_s:.0f} s."
        run_services.external_finish(run=run, status="failed", reason=message)
    Allocation.objects.filter(released=None, attempt__state=AttemptState.EXITED).update(
        released=now
    )
    return ended


def _check(attempt: Attempt, nodes: dict[str, Node], now: datetime, known: Presence) -> int:
    fence = str(attempt.fence)
    names = {share["node"] for share in attempt.placement} - set(attempt.nodes_exited)
    lost = {name for name in names if name not in nodes or nodes[name].health == Node.Health.LOST}
    if lost:
        with transaction.atomic():
            for name in sorted(lost):
                run_services.event_record(
                    run=attempt.run,
                    type="node_lost",
                    data={"node": name},
                    attempt=attempt.number,
                    origin=f"{attempt.number}/lost/{name}"[:80],
                )
        reason = (
            f"Node {', '.join(sorted(lost))} was lost: no heartbeat for "
            f"{settings.ENV.node_lost_s:.0f} s."
        )
        attempt_end.abandon(attempt, exit_class="lost", reason=reason, nodes=lost)
        return int(attempt.state == AttemptState.EXITED)
    up = {name for name in names if nodes[name].health == Node.Health.UP}
    if attempt.requested and _deliver_request(attempt, up, known):
        return int(attempt.state == AttemptState.EXITED)
    if attempt.state == AttemptState.ASSIGNED and attempt.launched is None:
        waited_s = (now - attempt.created).total_seconds()
        if waited_s > settings.ENV.launch_timeout_s:
            dispatch.control(attempt, "kill", grace_s=0.0)
            attempt_end.abandon(
                attempt,
                exit_class="lost",
                reason=f"No node launched the attempt within {waited_s:.0f} s.",
            )
            return 1
    missing = {name for name in up if known.missing_for(fence, name) > MISSING_S}
    if (
        attempt.state in (AttemptState.LAUNCHING, AttemptState.RUNNING)
        and missing
        and _was_launched(attempt, missing, known)
    ):
        reason = f"Node {', '.join(sorted(missing))} is up but no longer has this attempt."
        attempt_end.abandon(attempt, exit_class="lost", reason=reason, nodes=missing)
        return int(attempt.state == AttemptState.EXITED)
    if attempt.nodes_exited and names and known.wanted_for(fence, "straggler") > STRAGGLER_S:
        reason = (
            f"Node {', '.join(sorted(names))} did not end its share within {STRAGGLER_S:.0f} "
            "s of the others."
        )
        attempt_end.abandon(attempt, exit_class="infrastructure", reason=reason, nodes=names)
        return 1
    if attempt.state != AttemptState.RUNNING and not attempt.nodes_exited and not attempt.requested:
        _repeat_launch(attempt, up, known)
    return 0


def _was_launched(attempt: Attempt, missing: set[str], known: Presence) -> bool:
    """Whether the missing share was launched; otherwise its launch is repeated."""
    seen = known.states.get(str(attempt.fence), {})
    return attempt.state == AttemptState.RUNNING or bool(missing & set(seen))


def _repeat_launch(attempt: Attempt, up: set[str], known: Presence) -> None:
    """Repeat launch orders for nodes that have not reported the attempt."""
    fence = str(attempt.fence)
    unreported = up - set(known.states.get(fence, {}))
    if not unreported:
        return
    age_s = (clock.now() - attempt.created).total_seconds()
    first = attempt.dispatched is None
    if (first or age_s > REPEAT_S) and known.due(fence, "launch", 2.0 if first else REPEAT_S):
        dispatch.launch(attempt, nodes=unreported)


def _deliver_request(attempt: Attempt, up: set[str], known: Presence) -> bool:
    """Send the user's request until it has effect, as a kill after its grace; True if handled."""
    fence, action = str(attempt.fence), attempt.requested
    if (
        attempt.dispatched is None
        and attempt.launched is None
        and action not in run_services.ATTEMPT_REQUESTS
    ):
        attempt_end.abandon(
            attempt, exit_class="cancelled", reason="The attempt ended before its launch."
        )
        return True
    if action in run_services.ATTEMPT_REQUESTS:
        if (
            attempt.state == AttemptState.RUNNING
            and known.due(fence, action, 1.0)
            and dispatch.control(attempt, action)
        ):
            run_services.attempt_request_sent(attempt=attempt)
        return True
    grace_s = settings.ENV.cancel_grace_s if action == "cancel" else PAUSE_GRACE_S
    if known.wanted_for(fence, action) > grace_s + ESCALATE_S:
        if known.due(fence, "kill", REPEAT_S):
            dispatch.control(attempt, "kill", nodes=up, grace_s=0.0)
    elif known.due(fence, action, REPEAT_S):
        dispatch.control(attempt, action, nodes=up, grace_s=grace_s)
    return False
