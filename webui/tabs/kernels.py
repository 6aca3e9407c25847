"""The part of a run's page that tells which kernels run, and why: of the newest attempt that told
it.
"""

from __future__ import annotations

from typing import Any

from orchestrator.runs import selectors as runs
from webui.presentation.kernel_summary import EVENT, table
from webui.presentation.run_facts import Facts


def content(facts: Facts) -> dict[str, Any] | None:
    """None before the first step."""
    told = runs.events_of(run=facts.run, types=[EVENT], limit=1, newest=True)
    return table(told[0].data) if told else None
