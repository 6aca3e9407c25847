"""Runs that failed in the last 24 hours, each with its cause, for Overview."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

from django.utils import timezone

from orchestrator.runs import selectors as runs
from webui.tabs import failure

WINDOW: Final = timedelta(hours=24)
SHOWN: Final = 5


class FailedRun(NamedTuple):
    """A run with its reason, or the log line that names the error."""

    run: Any
    cause: str


class FailedRuns(NamedTuple):
    """The newest ones, and how many more there are."""

    rows: list[FailedRun]
    more: int


def failed_runs(user: Any, *, mine: bool) -> FailedRuns:
    """Read them: two queries, and one for the log of each run without a reason."""
    newest, count = runs.runs_failed_since(
        user=user, since=timezone.now() - WINDOW, limit=SHOWN, owner="me" if mine else None
    )
    rows = [FailedRun(run, failure.cause_of(run)) for run in newest]
    return FailedRuns(rows, count - len(rows))
