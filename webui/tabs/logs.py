"""Logs tab: the newest lines, equal lines of several ranks grouped, the first error marked."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from orchestrator.telemetry import selectors as telemetry
from webui.presentation.logs.log_grouping import first_cause, group_lines
from webui.presentation.logs.log_level import LEVELS
from webui.presentation.run_facts import Facts

LINES: Final = 300


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    q, level = request.GET.get("q", "").strip()[:200], request.GET.get("level", "")
    selected = request.GET.get("rank", "")
    rank = int(selected) if selected.lstrip("-").isdecimal() else None
    lines = telemetry.logs_newest(run=facts.run, rank=rank, q=q or None, limit=LINES)
    groups = group_lines(lines)
    return {
        "lines": [
            line
            for line in groups
            if level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)
        ],
        "first_cause": first_cause(groups),
        "q": q,
        "level": level,
        "rank": selected,
        "ranks": range(max(facts.run.devices, 1)),
        "full": len(lines) == LINES,
        "source": facts.source(),
    }
