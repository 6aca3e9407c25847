"""The sample texts that a run's model generated, by step, from its events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError

from orchestrator.runs.models import Run, RunEvent
from orchestrator.runs.outputs.valid_steps import without_discarded_steps
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
    rows = RunEvent.objects.filter(run=run, type=SAMPLES_WRITTEN).order_by("seq")
    samples = [each for event in rows if (each := _read(event)) is not None]
    written = ((each.attempt or 0, each.content.step, each) for each in samples)
    return [each for _, each in without_discarded_steps(written, run.rewinds)]


def _read(event: RunEvent) -> StepSamples | None:
    try:
        content = SamplesWritten.from_dict(event.data)
    except ValidationError:
        return None
    return StepSamples(event.attempt, event.time, content)
