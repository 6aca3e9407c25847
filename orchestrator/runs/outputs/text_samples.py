"""The sample texts that a run's model generated, by step, from its events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from orchestrator.runs.models import Run, RunEvent
from workers.contracts.wire.samples import SAMPLES_WRITTEN, SamplesWritten


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one step."""

    attempt: int | None
    time: datetime
    content: SamplesWritten


def has_samples(*, run: Run) -> bool:
    """Whether the run has recorded samples."""
    return RunEvent.objects.filter(run=run, type=SAMPLES_WRITTEN).exists()


def samples_of(*, run: Run) -> list[StepSamples]:
    """Samples by ascending step, without steps that a later attempt or a rewind discarded.

    Events in another format are skipped.
    """
    samples: list[StepSamples] = []
    for event in RunEvent.objects.filter(run=run, type=SAMPLES_WRITTEN).order_by("seq"):
        try:
            content = SamplesWritten.from_dict(event.data)
        except ValidationError:
            continue
        number = event.attempt or 0
        if any(number <= attempt and content.step > step for attempt, step in run.rewinds):
            continue
        samples = [sample for sample in samples if sample.content.step < content.step]
        samples.append(StepSamples(event.attempt, event.time, content))
    return samples
