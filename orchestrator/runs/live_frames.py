"""The live frames of a run's state: one for its own topic, one for `fleet`."""

from __future__ import annotations

from orchestrator.common import live
from orchestrator.common.units import iso
from orchestrator.runs.models import Run


def topic(run_id: int) -> str:
    """The run's live topic."""
    return f"run:{run_id}"


def run_state(run: Run) -> None:
    """Append the run's current state to `run:<id>` and `fleet`, in the caller's transaction."""
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
        "run": str(run.pk),
        "name": run.name,
        "state": str(run.state),
        "attempt": run.attempt_number,
        "wait_reason": run.wait_reason,
    }
    live.append_many(
        [live.NewFrame(topic(run.pk), "state", own), live.NewFrame("fleet", "state", summary)]
    )
