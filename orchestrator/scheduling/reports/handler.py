"""Handles reports from nodes: opens each sealed entry and applies it once, even if repeated.

Unreadable entries are counted, logged and dropped. Does not read streams; `inbox` does.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from typing import Any

from pydantic import ValidationError

from orchestrator.common import redis
from orchestrator.common.errors import Refusal
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet import services as fleet_services
from orchestrator.fleet.models import Node
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.reports import attempt_end, multi_node_hangs
from orchestrator.scheduling.reports.presence import presence
from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import (
    AttemptReport,
    AttemptState,
    Heartbeat,
    NodeInventory,
)

log = logging.getLogger(__name__)

dropped: Counter[str] = Counter()  # why entries were dropped, since this process started
_KILL_EVERY_S = 10.0


def report(text: str | bytes) -> bool:
    """Handle one entry of the reports stream; False if it was dropped."""
    try:
        kind, name = envelope.peek(text)
        if kind == names.KIND_JOIN:
            _join(text, token_id=name)
            return True
        node = fleet.node_named(name)
        if node is None:
            raise envelope.EnvelopeError("unknown", f"No node is named {name!r}.")
        body = envelope.open_envelope(fleet.node_secret(node), text, kind=kind, now=time.time())
        if kind == names.KIND_HEARTBEAT:
            _heartbeat(node, Heartbeat.from_dict(body))
        elif kind == names.KIND_REPORT:
            _attempt_report(node, AttemptReport.from_dict(body))
        else:
            raise envelope.EnvelopeError("kind", f"{kind!r} is not a kind of report.")
    except envelope.EnvelopeError as error:
        return _drop(error.code, str(error))
    except (ValidationError, ValueError) as error:
        return _drop("malformed", str(error))
    return True


def _drop(code: str, message: str) -> bool:
    dropped[code] += 1
    log.warning("A report was dropped (%s): %s", code, message)
    return False


def _join(text: str | bytes, *, token_id: str) -> None:
    """Handle a join, sealed with the token's key because the node has no secret yet."""
    body = envelope.open_envelope(
        fleet.join_key(token_id), text, kind=names.KIND_JOIN, now=time.time()
    )
    request = body.get("request") or {}
    reply: dict[str, Any]
    try:
        node, reply = fleet_services.node_joined(
            request=request, inventory=NodeInventory.from_dict(body.get("inventory") or {})
        )
        log.info("Node %s joined", node.name)
    except (Refusal, ValidationError) as error:
        reply = {"refused": str(error)}
        log.warning("A node was refused: %s", error)
    key = names.join_reply_key(str(request.get("nonce_a", "")))
    with redis.client().pipeline(transaction=False) as pipe:
        pipe.rpush(key, json.dumps(reply))
        pipe.expire(key, names.JOIN_REPLY_TTL_S)
        pipe.execute()


def _heartbeat(node: Node, beat: Heartbeat) -> None:
    fleet_services.node_heartbeat(node=node, samples=beat.samples, inventory=beat.inventory)
    reported = {item.fence: item.state for item in beat.attempts}
    placed = {str(attempt.fence): attempt for attempt in runs.attempts_on(node=node.name)}
    for fence, attempt in placed.items():
        state = reported.get(fence)
        if state is None:
            presence.lacks(fence, node.name)
        elif node.name not in attempt.nodes_exited:
            presence.saw(fence, node.name, state)
            _progress(attempt)
    for fence in set(reported) - set(placed):
        _kill_abandoned(node, fence)


def _kill_abandoned(node: Node, fence: str) -> None:
    """Kill an ended attempt that the node still runs: abandoned while the node was unreachable."""
    attempt = Attempt.objects.filter(fence=fence, state=AttemptState.EXITED).first()
    ended_s = (time.time() - attempt.ended.timestamp()) if attempt and attempt.ended else 0.0
    # a heartbeat may still name a supervisor that has just reported its exit
    if (
        attempt is not None
        and ended_s > _KILL_EVERY_S
        and presence.due(fence, f"end {node.name}", _KILL_EVERY_S)
    ):
        log.warning(
            "Node %s still runs attempt %s, which has ended; killing it", node.name, attempt.pk
        )
        dispatch.kill_stale_attempt(node, attempt_id=str(attempt.pk), fence=fence)


def _progress(attempt: Attempt) -> None:
    """Mark the attempt as launching at its first report, as running if all its nodes run."""
    if attempt.state == AttemptState.ASSIGNED:
        run_services.attempt_launching(attempt=attempt)
    nodes = [share["node"] for share in attempt.placement]
    if attempt.state != AttemptState.RUNNING and presence.all_running(str(attempt.fence), nodes):
        run_services.attempt_running(attempt=attempt)


def _attempt_report(node: Node, report: AttemptReport) -> None:
    attempt = runs.attempt_by_fence(attempt_id=report.attempt_id, fence=report.fence)
    if (
        attempt is None
        or node.name not in [share["node"] for share in attempt.placement]
        or report.node != node.name
    ):
        _drop(
            "stale",
            f"{node.name} reports {report.type} of attempt {report.attempt_id}, which is not "
            "placed on it or has another fence.",
        )
        return
    if report.type == "checkpoint":
        data = report.data
        run_services.checkpoint_record(
            run=attempt.run,
            attempt=attempt.number,
            step=int(data["step"]),
            path=str(data["path"]),
            tokens=int(data.get("tokens") or 0),
            bytes=int(data.get("bytes") or 0),
        )
    elif report.type == "artifact":
        name, size = str(report.data["name"])[:200], int(report.data.get("bytes") or 0)
        run_services.artifact_record(
            run=attempt.run,
            name=f"attempt-{attempt.number}-{name}",
            path=str(report.data["path"]),
            bytes=size,
        )
    elif report.type == "event":
        _event(node, attempt, report)
    elif attempt.state == AttemptState.EXITED:
        return
    elif report.type == "exited":
        attempt_end.node_exited(attempt, node=node.name, report=report.data)
    else:
        presence.saw(str(attempt.fence), node.name, report.type)
        _progress(attempt)


def _event(node: Node, attempt: Attempt, report: AttemptReport) -> None:
    type, data = str(report.data.get("type", "node")), dict(report.data.get("data") or {})
    if type == "hang" and multi_node_hangs.collect(attempt, node=node.name, data=data):
        return
    run_services.event_record(
        run=attempt.run,
        type=type[:60],
        data=data,
        attempt=attempt.number,
        rank=report.data.get("rank"),
        time=report.time,
        origin=f"{attempt.number}/{node.name}/{report.seq}"[:80],
    )
