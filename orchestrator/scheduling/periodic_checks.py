"""Periodic checks: silent nodes, missing attempts, orders to repeat, requests to escalate.

An unreachable node has not failed: its attempts end only when it is lost, and only those whose
leases have run out too. Does not place runs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from orchestrator.common import clock
from orchestrator.fleet import node_health
from orchestrator.fleet.models import Node
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs.models import Attempt, AttemptShare
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.cluster_engines import requests
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.reports import attempt_end, multi_node_hangs, revocation
from orchestrator.scheduling.reports.missing_attempts import Presence, presence
from orchestrator.scheduling.reports.silence import Liveness, liveness
from workers.contracts.wire.node_messages import AttemptState

log = logging.getLogger(__name__)

REPEAT_S = 15.0  # orders without effect are repeated
REPEATS_PER_PASS = 200  # attempts; the others follow in the next passes
MISSING_S = 20.0  # heartbeats of a node lack an attempt placed on it
STRAGGLER_S = 60.0  # after the other nodes of the attempt have exited
ESCALATE_S = 10.0  # after the grace period, before a request becomes a kill
PAUSE_GRACE_S = 60.0  # a pause or preemption waits for a step and a checkpoint


def reap(
    *,
    now: datetime | None = None,
    known: Presence | None = None,
    heard: Liveness | None = None,
    drained: bool = True,
) -> int:
    """Check all nodes and open attempts once; returns the number of attempts that it ended.

    `drained`: all reports that have arrived are applied. Otherwise nothing is declared lost,
    because an exit report may wait.
    """
    now, known, heard = now or clock.now(), known or presence, heard or liveness
    gone = _judge_nodes(heard, drained)
    nodes = {node.name: node for node in Node.objects.only("name", "health")}
    ended, repeated = 0, list[int]()
    for attempt in open_attempts():
        try:
            ended += _check(attempt, nodes, gone, now, known, heard, drained, repeated)
        except Exception:
            log.exception("Attempt %s could not be checked; the next pass retries", attempt.pk)
    if repeated:
        dispatch.launch_many(_for_launch(repeated))
    multi_node_hangs.record_due()
    for run in runs.external_silent(now=now):
        message = f"The program sent nothing for {settings.ENV.external_silent_s:.0f} s."
        run_services.external_finish(run=run, status="failed", reason=message)
    Allocation.objects.filter(released=None, attempt__state=AttemptState.EXITED).update(
        released=now
    )
    return ended


def open_attempts() -> QuerySet[Attempt]:
    """Attempts that have not exited, with their shares and the parts of runs that checks need."""
    alive = Attempt.objects.exclude(state=AttemptState.EXITED).exclude(run__kind="external")
    large = ("run__spec", "run__plan", "run__prediction", "run__summary", "run__notes")
    return alive.select_related("run").defer(*large).prefetch_related("shares").order_by("id")


def open_fences() -> dict[str, list[str]]:
    """The fences of attempts that have not exited, by node."""
    alive = Attempt.objects.exclude(state=AttemptState.EXITED).exclude(run__kind="external")
    fences: dict[str, list[str]] = {}
    pairs = alive.filter(shares__isnull=False).order_by("pk").values_list("shares__node", "fence")
    for node, fence in pairs:
        fences.setdefault(node, []).append(str(fence))
    return fences


def _judge_nodes(heard: Liveness, drained: bool) -> set[str]:
    """Update the health of nodes; names of nodes whose silent attempts are lost."""
    lost_s = settings.ENV.node_lost_s
    occupied = {
        share.node
        for share in AttemptShare.objects.exclude(state=AttemptState.EXITED).select_related(
            "attempt"
        )
        if heard.lease_silence(str(share.attempt.fence), share.node) < lost_s
    }
    changes = node_health.mark_lost_nodes(
        silence=heard.node_silence, occupied=occupied, may_lose=drained
    )
    for node in changes.lost:
        log.warning("Node %s is lost: no heartbeat for %.0f s", node.name, lost_s)
    for node in changes.held:
        log.warning("Node %s is overdue; an operator must confirm that it is lost", node.name)
    return {node.name for node in (*changes.lost, *changes.unreachable)}


def _check(
    attempt: Attempt,
    nodes: dict[str, Node],
    gone: Collection[str],
    now: datetime,
    known: Presence,
    heard: Liveness,
    drained: bool,
    repeated: list[int],
) -> int:
    """The number of attempts that it ended; adds those to launch again to `repeated`."""
    fence = str(attempt.fence)
    exits = attempt.nodes_exited
    if attempt.in_engine:
        return _check_engine_attempt(attempt, exits, known)
    names = {share["node"] for share in attempt.placement} - set(exits)
    if exits and not names:  # the database failed after the last exit was stored
        attempt_end.finish(attempt, exits)
        return 1
    lost = {
        name
        for name in names
        if name not in nodes
        or (
            (nodes[name].health == Node.Health.LOST or name in gone)
            and heard.lease_silence(fence, name) >= settings.ENV.node_lost_s
        )
    }
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
        attempt_end.abandon(
            attempt,
            exit_class="lost",
            reason=reason,
            nodes=lost,
            cause=run_services.NODE_LOST,
        )
        return int(attempt.state == AttemptState.EXITED)
    up = {name for name in names if nodes[name].health == Node.Health.UP}
    if attempt.requested and _deliver_request(attempt, up, known):
        return int(attempt.state == AttemptState.EXITED)
    if attempt.state == AttemptState.ASSIGNED and attempt.launched is None:
        waited_s = (now - attempt.created).total_seconds()
        late = waited_s > settings.ENV.launch_timeout_s and drained
        if late and revocation.revoke_unlaunched(fence, names):
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
        and drained
        and _was_launched(attempt, missing)
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
        _repeat_launch(attempt, up, known, repeated)
    return 0


def _check_engine_attempt(
    attempt: Attempt, exits: Mapping[str, Mapping[str, object]], known: Presence
) -> int:
    """Requests and exits; `cluster_engines.sync` detects lost jobs."""
    names = {share["node"] for share in attempt.placement} - set(exits)
    if exits and not names:
        attempt_end.finish(attempt, exits)
        attempt.refresh_from_db()
        return int(attempt.state == AttemptState.EXITED)
    if attempt.requested and attempt.state != AttemptState.ASSIGNED:
        _deliver_request(attempt, names, known)
    elif attempt.requested and known.due(str(attempt.fence), "kill", REPEAT_S):
        dispatch.control(attempt, "kill", nodes=names, grace_s=0.0)  # ends the job
    elif (
        not attempt.requested
        and requests.is_unwanted(attempt)
        and known.due(str(attempt.fence), "cancel", REPEAT_S)
    ):
        # its run was cancelled or paused while the job waited, which may start before it is ended
        dispatch.control(attempt, "cancel", nodes=names)
    return 0


def _was_launched(attempt: Attempt, missing: set[str]) -> bool:
    """Whether the missing share was launched; otherwise its launch is repeated."""
    return attempt.state == AttemptState.RUNNING or bool(missing & _launched_nodes(attempt))


def _launched_nodes(attempt: Attempt) -> set[str]:
    """Nodes that have reported the attempt."""
    return {share.node for share in attempt.shares.all() if share.state != AttemptState.ASSIGNED}


def _repeat_launch(attempt: Attempt, up: set[str], known: Presence, repeated: list[int]) -> None:
    """Repeat launch orders for nodes that have not reported the attempt.

    Those of attempts that no node has reported are added to `repeated`, because after an outage
    they are many and are sent together.
    """
    fence = str(attempt.fence)
    unreported = up - _launched_nodes(attempt)
    if not unreported:
        return
    age_s = (clock.now() - attempt.created).total_seconds()
    first = attempt.dispatched is None
    if (not first and age_s <= REPEAT_S) or len(repeated) >= REPEATS_PER_PASS:
        return
    if not known.due(fence, "launch", 2.0 if first else REPEAT_S):
        return
    if len(unreported) == len(attempt.placement):
        repeated.append(attempt.pk)
    else:
        dispatch.launch(attempt, nodes=unreported)


def _for_launch(ids: Sequence[int]) -> list[Attempt]:
    """These attempts with what launch orders need, unless they have ended."""
    rows = Attempt.objects.filter(pk__in=ids).exclude(state=AttemptState.EXITED)
    return list(rows.select_related("run__owner").order_by("id"))


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
