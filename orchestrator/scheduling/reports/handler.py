"""Handles reports from nodes: opens each sealed entry and applies it once, even if repeated.

Unreadable entries are counted and recorded as dead letters. Does not read streams; `inbox` does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from typing import Any

from pydantic import ValidationError

from orchestrator.common import redis
from orchestrator.common.errors import Refusal
from orchestrator.dead_letters.services import dead_letter_add
from orchestrator.fleet import broker_users, node_probes
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet import services as fleet_services
from orchestrator.fleet.models import EngineMember, Node
from orchestrator.planner.store import node_probes as planner_probes
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs import storage
from orchestrator.runs.models import Attempt
from orchestrator.runs.plan_trials import reports as plan_reports
from orchestrator.runs.store import copies
from orchestrator.scheduling.cluster_engines import homes
from orchestrator.scheduling.reports import (
    attempt_end,
    heartbeat_handler,
    multi_node_hangs,
    preflight_reports,
)
from orchestrator.scheduling.reports.missing_attempts import presence
from orchestrator.scheduling.reports.silence import liveness
from workers.contracts.wire import envelope, names, versions
from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.event_bodies import CheckpointSaved
from workers.contracts.wire.maintenance import plan_trials
from workers.contracts.wire.maintenance.node_probe import NodeProbed
from workers.contracts.wire.maintenance.preflight import PreflightReport
from workers.contracts.wire.maintenance.storage import StorageReport
from workers.contracts.wire.node_messages import (
    AttemptReport,
    AttemptState,
    NodeInventory,
)

log = logging.getLogger(__name__)

dropped: Counter[str] = Counter()  # why entries were dropped, since this process started


def report(text: str | bytes, *, written: float = 0.0, retried: bool = False) -> bool:
    """Handle one entry of the reports stream; False if it was dropped.

    `written` is in Unix seconds by the broker's clock. A retried entry was valid at that time.
    An entry that is not valid goes to the dead letters.
    """
    name = ""
    try:
        kind, name = envelope.peek(text)
        if kind == names.KIND_JOIN:
            _join(text, token_id=name)
            return True
        if kind == names.KIND_HEARTBEAT:  # of an agent of version 0.1
            raw = text if isinstance(text, bytes) else text.encode()
            heartbeat_handler.apply(
                [liveness.arrived(name, raw)], broker_ahead_s=liveness.broker_ahead_s
            )
            return True
        node = fleet.node_named(name)
        if node is None:
            raise envelope.EnvelopeError("unknown", f"No node is named {name!r}.")
        # the sender set the expiry by its own clock
        now = (written if retried else time.time()) + node.clock_skew_s
        body = envelope.open_envelope(fleet.node_secret(node), text, kind=kind, now=now)
        if kind == names.KIND_REPORT:
            _attempt_report(node, AttemptReport.from_dict(body))
        elif kind == names.KIND_COLLECTED:
            storage.storage_report(
                node=homes.name_of_sender(node), report=StorageReport.from_dict(body)
            )
        elif kind == names.KIND_PROBED and isinstance(node, Node):
            _probed(node, NodeProbed.from_dict(body))
        else:
            raise envelope.EnvelopeError("kind", f"{kind!r} is not a kind of report.")
    except envelope.EnvelopeError as error:
        return _reject(error.code, str(error), text, name, written)
    except (ValidationError, ValueError) as error:
        return _reject("malformed", str(error), text, name, written)
    return True


def _probed(node: Node, answer: NodeProbed) -> None:
    """Store the result of a requested probe, or the reason for its absence. Raises ValueError."""
    if answer.report is None:
        node_probes.failure_record(node=node, message=answer.problem)
        return
    try:
        planner_probes.probe_record(node=node, report=answer.report)
    except ValueError as error:
        node_probes.failure_record(node=node, message=str(error))
        raise


def _reject(code: str, message: str, text: str | bytes, node: str, written: float) -> bool:
    """Drop an entry that is not valid, and record it for the operator."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    dead_letter_add(
        source="reports", node=node, code=code, reason=message, message=raw, written=written
    )
    return _drop(code, message)


def _drop(code: str, message: str) -> bool:
    dropped[code] += 1
    log.warning("A report was dropped (%s): %s", code, message)
    return False


def _join(text: str | bytes, *, token_id: str) -> None:
    """Handle a join, sealed with the token's key because the node has no secret yet.

    The token itself expires and works once, so the expiry by the node's clock does not matter.
    """
    body = _open_join(text, token_id)
    request = body.get("request") or {}
    reply: dict[str, Any]
    try:
        node, reply = fleet_services.node_joined(
            request=request,
            inventory=NodeInventory.from_dict(body.get("inventory") or {}),
            peer=versions.parse_peer(body.get("release"), body.get("wire")),
        )
        reply |= {"release": versions.RELEASE, "wire": str(versions.WIRE)}
        if broker_users.apply_node(node.name):  # before the node learns its name
            reply[broker_access.FIELD_USER] = broker_access.node_user(node.name)
        log.info("Node %s joined", node.name)
    except (Refusal, ValidationError) as error:
        reply = {"refused": str(error)}
        if isinstance(error, Refusal) and error.type == "node-incompatible":
            reply["code"] = names.INCOMPATIBLE
        log.warning("A node was refused: %s", error)
    key = names.join_reply_key(str(request.get("nonce_a", "")))
    with redis.client().pipeline(transaction=False) as pipe:
        pipe.rpush(key, json.dumps(reply))
        pipe.expire(key, names.JOIN_REPLY_TTL_S)
        pipe.execute()


def _open_join(text: str | bytes, token_id: str) -> dict[str, Any]:
    """The body of a join; its token may have been made under an earlier server key."""
    *earlier, oldest = [fleet.join_key(token_id, key) for key in fleet.server_keys()]
    for key in earlier:
        with contextlib.suppress(envelope.EnvelopeError):
            return envelope.open_envelope(key, text, kind=names.KIND_JOIN, now=0.0)
    return envelope.open_envelope(oldest, text, kind=names.KIND_JOIN, now=0.0)


def _attempt_report(node: Node | EngineMember, report: AttemptReport) -> None:
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
    if report.type == "checkpoint" and not run_services.in_run_folder(
        attempt.run_id, str(report.data.get("path", ""))
    ):
        _drop(
            "path",
            f"{node.name} reports a checkpoint of run {attempt.run_id} outside its folder.",
        )
        return
    if report.type == "checkpoint":
        saved = CheckpointSaved.from_dict(report.data)
        run_services.checkpoint_record(
            run=attempt.run,
            attempt=attempt.number,
            step=saved.step or 0,
            path=saved.path,
            tokens=saved.tokens or 0,
            bytes=saved.bytes or 0,
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
        presence.present(str(attempt.fence), node.name)
        run_services.share_advance(attempt_id=attempt.pk, node=node.name, state=report.type)
        run_services.attempt_progress(attempt=attempt)


def _event(node: Node | EngineMember, attempt: Attempt, report: AttemptReport) -> None:
    type, data = str(report.data.get("type", "node")), dict(report.data.get("data") or {})
    if type == "preflight" and isinstance(node, Node):
        preflight_reports.apply(attempt, node=node, report=PreflightReport.from_dict(data))
    if type == "hang" and multi_node_hangs.collect(attempt, node=node.name, data=data):
        return
    if type in copies.EVENTS:
        copies.apply_event(
            run=attempt.run, attempt=attempt.number, node=node.name, type=type, data=data
        )
    if type in plan_trials.EVENTS:
        plan_reports.apply_event(attempt=attempt, type=type, data=data, time=report.time)
    run_services.event_record(
        run=attempt.run,
        type=type[:60],
        data=data,
        attempt=attempt.number,
        rank=report.data.get("rank"),
        time=report.time,
        origin=f"{attempt.number}/{node.name}/{report.seq}"[:80],
    )
