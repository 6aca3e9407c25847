"""Compares running attempts with their prediction, some steps after their first points.

Does not depend on how points arrive; the end of an attempt triggers its own comparison.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from orchestrator.runs.models import Run
from orchestrator.telemetry.outcome import EARLY, misses_record
from orchestrator.telemetry.slowdown import slowdown_record

log = logging.getLogger(__name__)

_CACHED: Final = 2000  # attempts


class _Due(NamedTuple):
    """The next comparison, at this step; `speed_only` if the other numbers have been compared."""

    step: int
    speed_only: bool = False


@dataclass(slots=True)
class PredictionChecks:
    """Schedules one comparison per attempt, repeated for the speed while too few steps exist."""

    _due: dict[tuple[int, int], _Due | None] = field(default_factory=dict)  # None: done

    def update(self, summaries: dict[int, dict[str, Any]]) -> None:
        """Compare the attempts in `{run: headline numbers}` that have reached their step."""
        for run_id, summary in summaries.items():
            key, step = (run_id, summary["attempt"]), summary["step"]
            due = self._due.setdefault(key, _Due(step + EARLY))
            if due is None or step < due.step:
                continue
            self._due[key] = None
            run = Run.objects.filter(pk=run_id, kind="train").first()
            if run is not None and not _compare(run, key[1], due.speed_only):
                self._due[key] = _Due(step + EARLY, speed_only=True)
        while len(self._due) > _CACHED:
            del self._due[next(iter(self._due))]


def _compare(run: Run, attempt: int, speed_only: bool) -> bool:
    """Record a slowdown and misses; False while too few steps are logged to judge the speed."""
    enough = True
    try:
        enough = slowdown_record(run=run, attempt=attempt) is not None
        if not speed_only:
            misses_record(run=run, attempt=attempt)
    except (ValueError, KeyError, TypeError):
        log.exception("Run %s could not be compared with its prediction", run.pk)
    return enough
