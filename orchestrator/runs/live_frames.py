"""What a run tells live topics about its state: one frame for its own page, one for everybody's."""

from __future__ import annotations

from orchestrator.common import live
from orchestrator.common.units import iso
from orchestrator.runs.models import Run


def topic(run_id: int) -> str:
    return f"run:{run_id}"


def run_state(run: Run) -> None:
    """Appends the run's present state to `run:<id>` and `fleet`, inside the caller's transaction."""
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
    everybody = {
        "run": str(run.pk),
        "name": run.name,
        "state": str(run.state),
        "attempt": run.attempt_number,
        "wait_reason": run.wait_reason,
    }
    live.append_many([live.New(topic(run.pk), "state", own), live.New("fleet", "state", everybody)])
