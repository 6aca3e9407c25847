"""What the timer finds: silent nodes, attempts nobody launched or has, orders to repeat, requests
to sharpen.

Unreachable is not failed: only a node lost for long ends what it had. Does not place anything.
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

REPEAT_S = 15.0  # an order without effect is sent again
MISSING_S = 20.0  # a node beats without an attempt that it was given
STRAGGLER_S = 60.0  # other nodes have exited, this one has not
SHARPEN_S = 10.0  # beyond the grace, before a request becomes a kill
PAUSE_GRACE_S = 60.0  # a pause or preemption waits for a step and a checkpoint


def reap(*, now: datetime | None = None, known: Presence | None = None) -> int:
    """One pass over nodes and attempts that are not over; returns how many attempts ended by it."""
    now, known = now or clock.now(), known or presence
    heard_since = now - timedelta(seconds=time.monotonic() - known.since)
    gone = fleet.mark_silent(now=now, listening_since=heard_since)
    for node in gone.lost:
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
            ended += _look(attempt, nodes, now, known)
        except Exception:
            log.exception(
                "Attempt %s could not be looked after; the next pass tries again", attempt.pk
            )
    multi_node_hangs.tell_due()
    for run in runs.external_silent(now=now):
        message = f"Nothing was heard of it for {settings.ENV.external_silent_s:.0f} s."
        run_services.external_finish(run=run, status="failed", reason=message)
    Allocation.objects.filter(released=None, attempt__state=AttemptState.EXITED).update(
        released=now
    )
    return ended


def _look(attempt: Attempt, nodes: dict[str, Node], now: datetime, known: Presence) -> int:
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
        attempt_end.give_up(attempt, exit_class="lost", reason=reason, nodes=lost)
        return int(attempt.state == AttemptState.EXITED)
    up = {name for name in names if nodes[name].health == Node.Health.UP}
    if attempt.requested and _request(attempt, up, known):
        return int(attempt.state == AttemptState.EXITED)
    if attempt.state == AttemptState.ASSIGNED and attempt.launched is None:
        waited_s = (now - attempt.created).total_seconds()
        if waited_s > settings.ENV.launch_timeout_s:
            dispatch.control(attempt, "kill", grace_s=0.0)
            attempt_end.give_up(
                attempt, exit_class="lost", reason=f"No node launched it within {waited_s:.0f} s."
            )
            return 1
    missing = {name for name in up if known.missing_for(fence, name) > MISSING_S}
    if (
        attempt.state in (AttemptState.LAUNCHING, AttemptState.RUNNING)
        and missing
        and _was_there(attempt, missing, known)
    ):
        reason = f"Node {', '.join(sorted(missing))} is up but has this attempt no more."
        attempt_end.give_up(attempt, exit_class="lost", reason=reason, nodes=missing)
        return int(attempt.state == AttemptState.EXITED)
    if attempt.nodes_exited and names and known.wanted_for(fence, "straggler") > STRAGGLER_S:
        reason = (
            f"Node {', '.join(sorted(names))} did not end its share within {STRAGGLER_S:.0f} "
            "s of the others."
        )
        attempt_end.give_up(attempt, exit_class="infrastructure", reason=reason, nodes=names)
        return 1
    if attempt.state != AttemptState.RUNNING and not attempt.nodes_exited and not attempt.requested:
        _repeat_launch(attempt, up, known)
    return 0


def _was_there(attempt: Attempt, missing: set[str], known: Presence) -> bool:
    """Whether the missing share had been launched; one that never was is launched again instead."""
    seen = known.states.get(str(attempt.fence), {})
    return attempt.state == AttemptState.RUNNING or bool(missing & set(seen))


def _repeat_launch(attempt: Attempt, up: set[str], known: Presence) -> None:
    """Orders again, for nodes that have shown nothing of the attempt: a doubled message does
    nothing.
    """
    fence = str(attempt.fence)
    unseen = up - set(known.states.get(fence, {}))
    if not unseen:
        return
    age_s = (clock.now() - attempt.created).total_seconds()
    first = attempt.dispatched is None
    if (first or age_s > REPEAT_S) and known.due(fence, "launch", 2.0 if first else REPEAT_S):
        dispatch.launch(attempt, nodes=unseen)


def _request(attempt: Attempt, up: set[str], known: Presence) -> bool:
    """Takes a wish to the nodes, again until it has effect, as a kill after its grace; True if it
    is done with.
    """
    fence, action = str(attempt.fence), attempt.requested
    if (
        attempt.dispatched is None
        and attempt.launched is None
        and action not in run_services.WISHES
    ):
        attempt_end.give_up(attempt, exit_class="cancelled", reason="Ended before it was launched.")
        return True
    if action in run_services.WISHES:
        if (
            attempt.state == AttemptState.RUNNING
            and known.due(fence, action, 1.0)
            and dispatch.control(attempt, action)
        ):
            run_services.attempt_wish_sent(attempt=attempt)
        return True
    grace_s = settings.ENV.cancel_grace_s if action == "cancel" else PAUSE_GRACE_S
    if known.wanted_for(fence, action) > grace_s + SHARPEN_S:
        if known.due(fence, "kill", REPEAT_S):
            dispatch.control(attempt, "kill", nodes=up, grace_s=0.0)
    elif known.due(fence, action, REPEAT_S):
        dispatch.control(attempt, action, nodes=up, grace_s=grace_s)
    return False
