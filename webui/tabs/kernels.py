"""Kernels card of a run page: which kernels the newest reporting attempt selected, and why."""

from __future__ import annotations

from typing import Any

from orchestrator.runs import selectors as runs
from webui.presentation.kernel_summary import EVENT, table
from webui.presentation.run_facts import Facts


def content(facts: Facts) -> dict[str, Any] | None:
    """Return the kernel table; None before the first step."""
    events = runs.events_of(run=facts.run, types=[EVENT], limit=1, newest=True)
    return table(events[0].data) if events else None
