"""The texts that a run's model wrote at its checkpoints, step by step.

Reads events; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from orchestrator.runs.models import Run, RunEvent
from workers.contracts.wire.samples import SAMPLES_WRITTEN, SamplesWritten


@dataclass(frozen=True, slots=True)
class Written:
    attempt: int | None
    time: datetime
    told: SamplesWritten


def samples_told(*, run: Run) -> bool:
    return RunEvent.objects.filter(run=run, type=SAMPLES_WRITTEN).exists()


def samples_of(*, run: Run) -> list[Written]:
    """By rising step, of the course that the run went: what a later attempt did again, or a rewind
    gave up, is left
    out. Events of other programs that are no such texts are none."""
    found: list[Written] = []
    for event in RunEvent.objects.filter(run=run, type=SAMPLES_WRITTEN).order_by("seq"):
        try:
            told = SamplesWritten.from_dict(event.data)
        except ValidationError:
            continue
        if any(
            (event.attempt or 0) <= attempt and told.step > back for attempt, back in run.rewinds
        ):
            continue
        found = [each for each in found if each.told.step < told.step]
        found.append(Written(event.attempt, event.time, told))
    return found
