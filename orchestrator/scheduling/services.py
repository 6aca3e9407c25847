"""The scheduler's actions: handle a report, place queued runs, check running attempts."""

from __future__ import annotations

from orchestrator.scheduling.reaper import reap
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.tick import TickResult, tick

__all__ = ["TickResult", "reap", "report", "tick"]
