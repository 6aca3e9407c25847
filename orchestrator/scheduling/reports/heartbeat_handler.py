"""Applies new heartbeats: node health and readings, states of attempts, abandoned attempts.

All heartbeats of a poll take a few statements together. Does not decide that a node is lost.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.dead_letters.outages import is_outage
from orchestrator.device_history.recorder import gathering
from orchestrator.fleet import node_health
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Node
from orchestrator.fleet.node_health import NodeBeat
from orchestrator.runs import selectors as runs
from orchestrator.runs import services as run_services
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.reports.missing_attempts import presence
from orchestrator.scheduling.reports.silence import NewHeartbeat
from workers.contracts.wire import envelope, names, versions
from workers.contracts.wire.node_messages import DeviceSample, Heartbeat

log = logging.getLogger(__name__)
_KILL_EVERY_S = 10.0
_SAMPLES = TypeAdapter(list[DeviceSample])


def apply(beats: Sequence[NewHeartbeat], *, broker_ahead_s: float = 0.0) -> bool:
    """Apply the heartbeats; True if a node is back or changed, so a tick is worthwhile.

    `broker_ahead_s` is the broker's clock minus this machine's. Heartbeats that are forged,
    unreadable, of unknown nodes, or that cannot be applied are logged and ignored.
    """
    try:
        return _apply(beats, broker_ahead_s)
    except Exception as error:
        if is_outage(error):
            raise
        if len(beats) == 1:
            log.exception("The heartbeat of %s cannot be applied and is ignored", beats[0].node)
            return False
        log.warning("Heartbeats are applied one by one: %s: %s", type(error).__name__, error)
        return any([apply([beat], broker_ahead_s=broker_ahead_s) for beat in beats])


def _apply(beats: Sequence[NewHeartbeat], broker_ahead_s: float) -> bool:
    known = {sender.name: sender for sender in fleet.senders([beat.node for beat in beats])}
    readings: list[tuple[NewHeartbeat, Heartbeat]] = []
    for beat in beats:
        sender = known.get(beat.node)
        if sender is None:
            continue
        try:
            # the broker stamps arrival, so the sender's clock does not matter: nothing expires
            body = envelope.open_envelope(
                sender.secret, beat.text, kind=names.KIND_HEARTBEAT, now=0.0
            )
            readings.append((beat, _read(beat, body)))
        except (envelope.EnvelopeError, ValidationError, ValueError) as error:
            log.warning("A heartbeat of %s is ignored: %s", beat.node, error)
    if not readings:
        return False
    back = node_health.heartbeats_record(
        beats=[
            NodeBeat(
                node=known[beat.node],
                time=beat.stamp - broker_ahead_s,
                samples=_SAMPLES.dump_json(reading.samples, exclude_none=True).decode(),
                clock_skew_s=reading.time - (beat.stamp - broker_ahead_s),
                inventory=reading.inventory,
                peer=_peer(reading),
                supervisors=[
                    (item.release or "", item.wire or "")
                    for item in reading.attempts
                    if versions.parse_peer(item.release, item.wire).wire != versions.WIRE
                ],
                dropped_orders=reading.dropped_orders or 0,
            )
            for beat, reading in readings
        ]
    )
    for beat, reading in readings:
        if reading.samples or reading.machine is not None:
            gathering.add(
                node=known[beat.node].pk,
                time=beat.stamp - broker_ahead_s,
                samples=reading.samples,
                machine=reading.machine,
            )
    _apply_attempts([pair for pair in readings if not _is_refused(_peer(pair[1]))])
    return back


def _read(beat: NewHeartbeat, body: dict[str, Any]) -> Heartbeat:
    """The heartbeat; of a refused version only the fact that the node is alive."""
    peer = versions.parse_peer(body.get("release"), body.get("wire"))
    if not _is_refused(peer):
        return Heartbeat.from_dict(body)
    wire = str(peer.wire or "unreadable")
    return Heartbeat(node=beat.node, time=beat.stamp, release=peer.release, wire=wire)


def _peer(reading: Heartbeat) -> versions.PeerVersion:
    return versions.parse_peer(reading.release, reading.wire)


def _is_refused(peer: versions.PeerVersion) -> bool:
    return versions.skew(versions.WIRE, peer.wire) is versions.Skew.REFUSED


def _apply_attempts(readings: Sequence[tuple[NewHeartbeat, Heartbeat]]) -> None:
    """Compare the attempts that nodes report with those that are placed on them."""
    placed: dict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for node, fence, attempt, state in runs.shares_on([beat.node for beat, _ in readings]):
        placed[node][fence] = attempt, state
    advanced: set[int] = set()
    abandoned: list[tuple[str, str]] = []
    for beat, reading in readings:
        reported = {item.fence: item.state for item in reading.attempts}
        for fence, (attempt, state) in placed[beat.node].items():
            now = reported.get(fence)
            if now is None:
                presence.lacks(fence, beat.node)
                continue
            presence.present(fence, beat.node)
            if run_services.share_advance(
                attempt_id=attempt, node=beat.node, state=now, known=state
            ):
                advanced.add(attempt)
        abandoned += [(beat.node, fence) for fence in set(reported) - set(placed[beat.node])]
    for one in Attempt.objects.filter(pk__in=advanced).select_related("run").order_by("pk"):
        run_services.attempt_progress(attempt=one)
    for node, fence in abandoned:
        _kill_abandoned(node, fence)


def _kill_abandoned(node: str, fence: str) -> None:
    """Kill an ended attempt that the node still runs: abandoned while the node was unreachable."""
    attempt = runs.attempt_ended(fence=fence)
    ended_s = (time.time() - attempt.ended.timestamp()) if attempt and attempt.ended else 0.0
    # a heartbeat may still name a supervisor that has just reported its exit
    if (
        attempt is not None
        and ended_s > _KILL_EVERY_S
        and presence.due(fence, f"end {node}", _KILL_EVERY_S)
    ):
        log.warning("Node %s still runs attempt %s, which has ended; killing it", node, attempt.pk)
        row = fleet.node_named(node)
        if isinstance(row, Node):
            dispatch.kill_stale_attempt(row, attempt_id=str(attempt.pk), fence=fence)
