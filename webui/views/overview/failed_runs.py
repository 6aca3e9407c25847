"""Runs that failed in the last 24 hours, each with its cause, for Overview."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

from django.urls import reverse
from django.utils import timezone

from orchestrator.common.units import iso
from orchestrator.runs import selectors as runs
from webui.forms.run_filters import RunFilters
from webui.tabs import failure

WINDOW: Final = timedelta(hours=24)
SHOWN: Final = 5


class FailedRun(NamedTuple):
    """A run with its reason, or the log line that names the error."""

    run: Any
    cause: str


class FailedRuns(NamedTuple):
    """The newest ones, how many more there are, and the list with all of them."""

    rows: list[FailedRun]
    more: int
    url: str


def failed_runs(user: Any, *, mine: bool) -> FailedRuns:
    """Read them: two queries, and one for the log of each run without a reason."""
    # full minutes, so that the part with the link does not change each time
    since = (timezone.now() - WINDOW).replace(second=0, microsecond=0)
    owner = "me" if mine else ""
    newest, count = runs.runs_failed_since(user=user, since=since, limit=SHOWN, owner=owner or None)
    rows = [FailedRun(run, failure.cause_of(run)) for run in newest]
    listed = RunFilters(state="failed", owner=owner, query=f'ended >= "{iso(since)}"')
    return FailedRuns(rows, count - len(rows), reverse("runs") + listed.url())
