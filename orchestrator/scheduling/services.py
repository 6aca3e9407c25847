"""What the scheduler does, one verb each: take in a report, place what waits, look after what runs."""

from __future__ import annotations

from orchestrator.scheduling.reaper import reap
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.tick import Pass, tick

__all__ = ["Pass", "reap", "report", "tick"]
