"""The cause of a failed run: in one line, and with the log around the error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _

from orchestrator.telemetry import selectors as telemetry
from webui.presentation.logs.log_grouping import LogGroup, first_cause, group_lines
from webui.presentation.run_facts import Facts

_LINES: Final = 300  # newest lines that are searched for the error
_BEFORE: Final = 12
_AFTER: Final = 3


@dataclass(frozen=True)
class Failure:
    """`lines` end shortly after the error; empty if no log line names one."""

    reason: str
    lines: list[LogGroup]
    cause: LogGroup | None


def cause_of(run: Any) -> str:
    """Return the reason of a failed run, else the log line that names the error."""
    if reason := str((run.exit or {}).get("reason") or ""):
        return reason
    cause = first_cause(group_lines(telemetry.logs_newest(run=run, limit=_LINES)))
    return cause.text if cause is not None else _("No reason was reported.")


def failure(facts: Facts) -> Failure | None:
    """Return why the run failed; None for a run that did not. One query."""
    if facts.run.state != "failed":
        return None
    lines = group_lines(telemetry.logs_newest(run=facts.run, limit=_LINES))
    cause = first_cause(lines)
    excerpt: list[LogGroup] = []
    if cause is not None:
        same = [line for line in lines if line.attempt == cause.attempt]
        same = [line for line in same if line.ranks[0] in cause.ranks]
        at = next(i for i, line in enumerate(same) if line is cause)
        excerpt = same[max(0, at - _BEFORE) : at + 1 + _AFTER]
    return Failure(str((facts.run.exit or {}).get("reason") or ""), excerpt, cause)
