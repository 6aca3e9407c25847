"""One scheduling pass: read, decide, place gangs in short transactions, send their orders.

A pass whose input has not changed ends after a few aggregates. Safe to run concurrently:
conditional updates create an attempt once, and a constraint lets a device be held once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.conf import settings

from orchestrator.common import clock
from orchestrator.runs import services as runs
from orchestrator.runs.lifecycle.attempts import KEEPS_PLACE_S
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import checkpoint_pins, dispatch
from orchestrator.scheduling.placement import batches, changes, reasons, snapshot
from orchestrator.scheduling.policy import RESERVE_AFTER_S, Decision, QueuedRun, Wait
from orchestrator.scheduling.preemption import requests as preemption
from orchestrator.scheduling.queue import decision_store

log = logging.getLogger(__name__)

REST_LIFE = timedelta(seconds=2)  # a run submitted meanwhile waits at most this long
REST_LIFE_SAME = timedelta(seconds=20)  # while the queue has changed only by placements
REASONS_PER_PASS = 2000  # rows whose reason changes; the others follow in the next passes


@dataclass(frozen=True)
class RemainingDecision:
    """The part of a decision that exceeded a pass's budget; the next pass continues with it."""

    decided: datetime
    fleet: str  # fingerprint of nodes, devices and pools
    current: snapshot.Snapshot
    decision: Decision
    queue: changes.Queue  # as this decision's placements leave it

    def usable(self, inputs: changes.Inputs, now: datetime) -> bool:
        """Whether the fleet is the same, and the queue is too or the decision is recent.

        Runs that left the queue meanwhile are skipped, as are devices that are held.
        """
        life = REST_LIFE_SAME if inputs.queue == self.queue else REST_LIFE
        return self.fleet == inputs.fleet and now - self.decided < life


@dataclass(frozen=True)
class TickResult:
    """Attempts placed by one tick, and the number of runs that wait.

    With a `rest`, further runs fit: the next tick should follow at once and continue with it.
    """

    placed: tuple[Attempt, ...] = ()
    waiting: int = 0
    rest: RemainingDecision | None = None

    @property
    def more(self) -> bool:
        """Whether further runs fit."""
        return self.rest is not None


def tick(*, now: datetime | None = None, rest: RemainingDecision | None = None) -> TickResult:
    """Place the runs that fit, at most `placements_per_tick`; store why the others wait.

    `rest` is that of the previous tick, if any.
    """
    now = now or clock.now()
    inputs = changes.read()
    if not inputs.waiting:
        decision_store.clear(now=now)
        return TickResult()
    checkpoint_pins.pin_for_forks()
    continued = rest is not None and rest.usable(inputs, now)
    if rest is not None and continued:
        decided, current, decision = rest.decided, rest.current, rest.decision
    else:
        if decision_store.is_current(inputs, now):
            return TickResult(waiting=inputs.waiting)
        decided, current = now, snapshot.take()
        decision = current.decide(now, estimated=0)
        if not decision.placements:  # the next pass decides again after placements, then estimates
            decision = current.decide(now)
            decision = _with_preemption(current, decision, now)
    budget = settings.ENV.placements_per_tick
    placed: list[Attempt] = []
    for batch in batches.split(decision.placements[:budget]):
        attempts = batches.create(current, batch)
        dispatch.launch_many(attempts)
        placed += attempts
    later = decision.placements[budget:]
    left = inputs.queue.without([attempt.run.priority for attempt in placed])
    following = RemainingDecision(
        decided, inputs.fleet, current, replace(decision, placements=later), left
    )
    if continued and later:  # reasons and the decision are stored
        return TickResult(tuple(placed), inputs.waiting - len(placed), following)
    waits = _waits(current.queue, decision, {attempt.run_id for attempt in placed})
    changed = {
        wait.run: wait.reason for wait in waits if current.reasons[wait.run] != wait.reason[:300]
    }
    if later:  # the next pass follows at once; runs without a reason get theirs now
        changed = {run: reason for run, reason in changed.items() if not current.reasons[run]}
    some = dict(list(changed.items())[:REASONS_PER_PASS])
    if some:
        runs.wait_reasons_set(reasons=some)
    settled = not decision.placements and len(some) == len(changed)
    decision_store.store(
        waits,
        now=now,
        fingerprint=inputs.fingerprint if settled else "",
        next_change=_next_change(current, now),
    )
    return TickResult(tuple(placed), len(waits), following if later else None)


def _with_preemption(current: snapshot.Snapshot, decision: Decision, now: datetime) -> Decision:
    """Preempt for runs of high priority; their reasons then name the runs that stop."""
    texts = preemption.preempt(current, decision, now=now)
    if not texts:
        return decision
    waits = [replace(wait, reason=texts.get(wait.run, wait.reason)) for wait in decision.waits]
    return replace(decision, waits=tuple(waits))


def _waits(queue: Sequence[QueuedRun], decision: Decision, placed: set[int]) -> list[Wait]:
    """All runs that still wait, in the order of the decision."""
    later = [
        Wait(placement.run, 0, reasons.NEXT_PASS)
        for placement in decision.placements
        if placement.run not in placed
    ]
    waits = [*later, *decision.waits]
    return [replace(wait, position=number) for number, wait in enumerate(waits, start=1)]


def _next_change(current: snapshot.Snapshot, now: datetime) -> float:
    """When the first back-off or window ends, or a run may reserve devices, stops avoiding a node
    or no longer keeps its place.

    In Unix seconds.
    """
    queue, start = current.queue, now.timestamp()
    times = [run.queued_at + RESERVE_AFTER_S for run in queue]
    times += [run.not_before for run in queue if run.not_before is not None]
    times += [run.avoid_until for run in queue if run.avoid_until is not None]
    times += [run.queued_at + KEEPS_PLACE_S for run in queue if run.keeps_place]
    times += {window.end for node in current.nodes for window in node.windows}
    return min((time for time in times if time > start), default=math.inf)
