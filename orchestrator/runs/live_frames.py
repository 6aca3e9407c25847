"""The live frames of a run's state: one for its own topic, one for `fleet`."""

from __future__ import annotations

from typing import Any

from orchestrator.common import live
from orchestrator.common.units import iso
from orchestrator.runs.models import Run


def topic(run_id: int) -> str:
    """The run's live topic."""
    return f"run:{run_id}"


def run_state(run: Run) -> None:
    """Append the run's current state to `run:<id>` and `fleet`, in the caller's transaction."""
    live.append_many(list(state_frames(run)))


def state_frames(run: Run) -> tuple[live.NewFrame, live.NewFrame]:
    """The frames of the run's current state for `run:<id>` and for `fleet`."""
    own = {
        **run.summary,
        "state": str(run.state),
        "attempt": run.attempt_number,
        "requested": run.requested,
        "wait_reason": run.wait_reason,
        "started": iso(run.started),
        "ended": iso(run.ended),
        "exit": run.exit,
    }
    summary = {
        **live.owned_by(run.owner_id),
        "run": str(run.pk),
        "name": run.name,
        "state": str(run.state),
        "attempt": run.attempt_number,
        "wait_reason": run.wait_reason,
        "summary": run.summary,  # progress frames are not replayed
    }
    return live.NewFrame(topic(run.pk), "state", own), live.NewFrame("fleet", "state", summary)


def progress(owner_id: int, run_id: int, summary: dict[str, Any]) -> dict[str, Any]:
    """The body of a `progress` frame on `fleet`: headline numbers that the next ones replace."""
    return {**live.owned_by(owner_id), "run": str(run_id), "summary": summary}


def progress_text(owner_id: int, run_id: int, summary: dict[str, Any]) -> str:
    """The text of a `progress` frame, which has no number."""
    return live.unnumbered_text("progress", progress(owner_id, run_id, summary))
