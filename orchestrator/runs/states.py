"""The allowed state transitions of runs and attempts, and the transition itself.

A transition is a conditional UPDATE with its event and live frames, in one transaction.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction

from orchestrator.common import clock, conditional
from orchestrator.runs import events, live_frames
from orchestrator.runs.models import Attempt, Run
from workers.contracts.wire.node_messages import AttemptState, RunState

Q, S, R = RunState.QUEUED, RunState.STARTING, RunState.RUNNING
STOPPING, PAUSED = RunState.STOPPING, RunState.PAUSED
FINISHED, FAILED, CANCELLED = RunState.FINISHED, RunState.FAILED, RunState.CANCELLED

ENDED = frozenset({FINISHED, FAILED, CANCELLED})
ACTIVE = frozenset({S, R, STOPPING})  # an attempt holds devices

RUN_MOVES: dict[RunState, frozenset[RunState]] = {
    Q: frozenset({S, PAUSED, CANCELLED}),
    # a run that starts or runs may end in any way before it reports progress
    S: frozenset({R, STOPPING, Q, PAUSED, *ENDED}),
    R: frozenset({STOPPING, Q, PAUSED, *ENDED}),
    STOPPING: frozenset({Q, PAUSED, *ENDED}),
    PAUSED: frozenset({Q, CANCELLED}),
    # retried or rewound by a user
    FINISHED: frozenset({Q}),
    FAILED: frozenset({Q}),
    CANCELLED: frozenset({Q}),
}

ATTEMPT_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    # reports can overtake each other: RUNNING may arrive without LAUNCHING
    AttemptState.ASSIGNED: frozenset(
        {AttemptState.LAUNCHING, AttemptState.RUNNING, AttemptState.EXITED}
    ),
    AttemptState.LAUNCHING: frozenset({AttemptState.RUNNING, AttemptState.EXITED}),
    AttemptState.RUNNING: frozenset({AttemptState.EXITED}),
    AttemptState.EXITED: frozenset(),
}


def run_move(
    run: Run, to: RunState, *, by: str = "control plane", why: str = "", **values: Any
) -> bool:
    """Move the run from the state in `run` to another and set `values`; False if it lost the race.

    Raises ValueError for a transition that the table does not allow: a bug, not a user error.
    """
    old = RunState(run.state)
    if to not in RUN_MOVES[old]:
        raise ValueError(f"a run cannot go from {old} to {to}")
    with transaction.atomic():
        if not conditional.update(Run.objects.filter(pk=run.pk, state=old), state=to, **values):
            return False
        run.refresh_from_db()
        data = {"of": "run", "old": str(old), "new": str(to), "by": by, "why": why}
        events.record(
            run=run,
            new=[events.NewEvent("state_changed", data, attempt=run.attempt_number or None)],
        )
        live_frames.run_state(run)
    return True


def attempt_move(attempt: Attempt, to: AttemptState, *, why: str = "", **values: Any) -> bool:
    """Move the attempt from any state that allows it; False if it is already there or beyond."""
    allowed = [old for old, moves in ATTEMPT_MOVES.items() if to in moves]
    with transaction.atomic():
        events.lock(attempt.run_id)
        old = Attempt.objects.values_list("state", flat=True).get(pk=attempt.pk)
        if not conditional.update(
            Attempt.objects.filter(pk=attempt.pk, state__in=allowed), state=to, **values
        ):
            return False
        attempt.refresh_from_db()
        data = {"of": "attempt", "old": str(old), "new": str(to), "by": "node", "why": why}
        events.record(
            run=attempt.run, new=[events.NewEvent("state_changed", data, attempt=attempt.number)]
        )
    return True


def run_created(run: Run, *, by: str, extra: list[events.NewEvent]) -> None:
    """Record the first event and frames of a new run."""
    data = {"of": "run", "old": None, "new": str(run.state), "by": by, "why": "submitted"}
    first = events.NewEvent(
        "state_changed", data, attempt=run.attempt_number or None, time=clock.now()
    )
    events.record(run=run, new=[first, *extra])
    live_frames.run_state(run)
