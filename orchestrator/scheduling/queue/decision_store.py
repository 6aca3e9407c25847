"""Stores the newest decision about the queue in one row, which pages and REST read.

Does not depend on how a decision is made.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from orchestrator.common import clock
from orchestrator.scheduling import lease
from orchestrator.scheduling.models import Lease, QueueDecision
from orchestrator.scheduling.placement.changes import Inputs
from orchestrator.scheduling.policy import Wait

NAME = "queue"
LIFE_S = 60.0  # a decision for equal input is repeated after this time


class StoredWait(NamedTuple):
    """What the scheduler decided about a waiting run; `position` counts over the full queue."""

    position: int
    reason: str
    may_start: datetime | None


def is_current(inputs: Inputs, now: datetime) -> bool:
    """Whether the stored decision is that of a pass with this input at this time."""
    return QueueDecision.objects.filter(
        name=NAME, fingerprint=inputs.fingerprint, expires__gt=now
    ).exists()


def store(
    waits: Sequence[Wait], *, now: datetime, fingerprint: str, next_change: float = math.inf
) -> None:
    """Replace the decision; an empty `fingerprint` makes the next pass decide again.

    `next_change` (Unix seconds) is when time alone changes the decision.
    """
    texts: dict[str, int] = {}
    rows = [[wait.run, texts.setdefault(wait.reason, len(texts)), wait.may_start] for wait in waits]
    expires = min(now.timestamp() + LIFE_S, next_change)
    values = {
        "decided": now,
        "fingerprint": fingerprint,
        "expires": max(now, clock.from_unix(expires)),
        "waiting": len(rows),
        "reasons": list(texts),
        "waits": rows,
        "revision": uuid.uuid4().hex,
    }
    QueueDecision.objects.update_or_create(name=NAME, defaults=values)


def clear(*, now: datetime) -> None:
    """Store that no run waits; writes nothing if that is stored."""
    QueueDecision.objects.filter(name=NAME, waiting__gt=0).update(
        decided=now,
        fingerprint="",
        expires=now,
        waiting=0,
        reasons=[],
        waits=[],
        revision=uuid.uuid4().hex,
    )


class StoredDecision:
    """The newest decision: positions and waits of runs, in the queue's order."""

    def __init__(self, reasons: Sequence[str], waits: Sequence[Any]) -> None:
        self._reasons, self._waits = reasons, waits
        self.runs = [row[0] for row in waits]
        self._positions = {run: position for position, run in enumerate(self.runs, start=1)}

    def __len__(self) -> int:
        return len(self._waits)

    def position(self, run: int) -> int | None:
        """The run's place in the full queue, from 1; None if the decision does not name it."""
        return self._positions.get(run)

    def wait(self, run: int) -> StoredWait | None:
        """What was decided about the run."""
        position = self._positions.get(run)
        if position is None:
            return None
        _, text, start = self._waits[position - 1]
        may_start = clock.from_unix(start) if start is not None else None
        return StoredWait(position, self._reasons[text], may_start)


_newest: tuple[tuple[str, Any], StoredDecision] = (("", None), StoredDecision([], []))


def load() -> StoredDecision:
    """The newest decision. Each process reads a revision once: pages share it."""
    global _newest
    rows = QueueDecision.objects.filter(name=NAME)
    version = rows.values_list("revision", "decided").first()
    known, decided = _newest
    if version is not None and version[0] and version == known:
        return decided
    row = rows.values_list("revision", "decided", "reasons", "waits").first()
    if row is None:
        return StoredDecision([], [])
    revision, time, reasons, waits = row
    decided = StoredDecision(reasons, waits)
    _newest = (revision, time), decided
    return decided


def age(now: datetime) -> timedelta | None:
    """Time since the scheduler last confirmed the decision; None before its first pass."""
    decided = QueueDecision.objects.filter(name=NAME).values_list("decided", flat=True).first()
    beat = Lease.objects.filter(name=lease.NAME).values_list("beat", flat=True).first()
    times = [time for time in (decided, beat) if time is not None]
    return now - max(times) if times else None
