"""Logs tab: the newest lines, those that several ranks wrote alike folded into one, the first cause
marked.
"""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from orchestrator.telemetry import selectors as telemetry
from webui.presentation.log_grouping import LEVELS, first_cause, fold
from webui.presentation.run_facts import Facts

LINES: Final = 300


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    q, level = request.GET.get("q", "").strip()[:200], request.GET.get("level", "")
    wanted = request.GET.get("rank", "")
    rank = int(wanted) if wanted.lstrip("-").isdecimal() else None
    lines = telemetry.logs_newest(run=facts.run, rank=rank, q=q or None, limit=LINES)
    folded = fold(lines)
    return {
        "lines": [
            line
            for line in folded
            if level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)
        ],
        "first_cause": first_cause(folded),
        "q": q,
        "level": level,
        "rank": wanted,
        "ranks": range(max(facts.run.devices, 1)),
        "full": len(lines) == LINES,
        "source": facts.source(),
    }
