"""Groups of sampled answers of a reinforcement learning run, by step, from its events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from orchestrator.runs.models import Run, RunEvent
from orchestrator.runs.outputs.valid_steps import without_discarded_steps
from workers.contracts.wire.rollouts import ROLLOUTS_SAMPLED, RolloutsSampled


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The shown groups of one iteration."""

    attempt: int | None
    time: datetime
    content: RolloutsSampled


def rollouts_of(*, run: Run) -> list[StepRollouts]:
    """Groups by ascending step, without steps that a later attempt or a rewind discarded.

    Events in another format are skipped.
    """
    events = RunEvent.objects.in_bulk([pk for pk, _ in rollout_steps(run=run)])
    read = [_read(events[pk]) for pk in sorted(events)]
    return [each for each in read if each is not None]


def rollout_steps(*, run: Run) -> list[tuple[int, int]]:
    """The events that hold groups, as id and step, without reading the groups."""
    rows = RunEvent.objects.filter(run=run, type=ROLLOUTS_SAMPLED).order_by("seq")
    written = (
        (attempt or 0, step, pk)
        for pk, attempt, step in rows.values_list("pk", "attempt", "data__step")
        if isinstance(step, int)
    )
    return [(pk, step) for step, pk in without_discarded_steps(written, run.rewinds)]


def rollouts_at(*, event: int) -> StepRollouts | None:
    """The groups of one event; None if it is in another format."""
    return _read(RunEvent.objects.get(pk=event))


def _read(event: RunEvent) -> StepRollouts | None:
    try:
        content = RolloutsSampled.from_dict(event.data)
    except ValidationError:
        return None
    return StepRollouts(event.attempt, event.time, content)
