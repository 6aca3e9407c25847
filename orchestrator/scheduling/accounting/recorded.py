"""Reads the recorded facts about an ended attempt: steps, checkpoints, later resume points.

Writes nothing. Does not decide what is lost (`split`).
"""

from __future__ import annotations

from orchestrator.fleet.models import Node
from orchestrator.runs.models import Attempt, RunEvent
from orchestrator.runs.plan_trials.table import periods_of
from orchestrator.scheduling.accounting.split import AttemptTimes
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.exit_classes import ExitClass

# exit classes that keep all work of the attempt, unless a later one resumes from before its end
_RETAINED = (ExitClass.OK, ExitClass.CANCELLED)
_STEPPED = ("train",)  # kinds whose work depends on checkpoints


def read(attempt: Attempt) -> AttemptTimes:
    """The facts of an ended attempt. Times of ranks are corrected by their node's clock skew."""
    assert attempt.ended is not None, f"attempt {attempt} has not ended"
    ended = attempt.ended.timestamp()
    created = (attempt.held_from or attempt.ended).timestamp()
    skew_s = _skew_s(attempt)
    stepped = attempt.run.kind in _STEPPED
    seen = telemetry.progress(run=attempt.run, attempt=attempt.number)
    paused = attempt.exit_class == ExitClass.PREEMPTED and attempt.requested == "pause"
    return AttemptTimes(
        devices=sum(len(share["devices"]) for share in attempt.placement),
        created=created,
        ended=ended,
        exit_class=ExitClass.CANCELLED if paused else attempt.exit_class,
        queued=attempt.queued.timestamp() if attempt.queued else None,
        started=attempt.started.timestamp() if attempt.started else None,
        first_work=seen.first - skew_s if seen is not None and stepped else None,
        last_work=seen.last - skew_s if seen is not None else None,
        retained=_retained(attempt, skew_s) if stepped else ended,
        trials=_trials(attempt, ended, skew_s),
    )


def _trials(attempt: Attempt, ended: float, skew_s: float) -> tuple[float, float] | None:
    """When the attempt tried plans; until its end if it ended meanwhile."""
    period = periods_of(run=attempt.run).get(attempt.number)
    if period is None:
        return None
    began, until = period
    return began - skew_s, ended if until is None else until - skew_s


def resume_step(attempt: Attempt) -> int:
    """The step from which an attempt continued; 0 from the beginning."""
    return int((attempt.resume_from or {}).get("step") or 0)


def _retained(attempt: Attempt, skew_s: float) -> float | None:
    """Until when the attempt's work counts; None if none of it does."""
    rewound = [newest for newest, _ in attempt.run.rewinds if newest >= attempt.number]
    later = Attempt.objects.filter(run_id=attempt.run_id, number__gt=attempt.number)
    if rewound:  # attempts after a rewind continue where the user chose
        later = later.filter(number__lte=min(rewound))
    resumed = [resume_step(one) for one in later.only("resume_from")]
    if attempt.exit_class in _RETAINED and not resumed:
        return attempt.ended.timestamp() if attempt.ended else None
    saved = RunEvent.objects.filter(
        run_id=attempt.run_id, attempt=attempt.number, type="checkpoint_saved"
    )
    times = [
        event.time.timestamp() - skew_s
        for event in saved
        if not resumed or int(event.data.get("step") or 0) <= min(resumed)
    ]
    return max(times, default=None)


def _skew_s(attempt: Attempt) -> float:
    """By how many seconds the clock of the attempt's first node is ahead of this one."""
    names = [share["node"] for share in attempt.placement[:1]]
    rows = Node.objects.filter(name__in=names).values_list("clock_skew_s", flat=True)
    return float(rows.first() or 0.0)
