"""The allowed state transitions of runs and attempts, and the transition itself.

A transition is a conditional UPDATE with its event and live frames, in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import F

from orchestrator.common import clock, conditional, live
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


def runs_start(runs: Sequence[Run], *, why: Mapping[int, str]) -> list[Run]:
    """Move those of the runs that are queued to `starting`, with the next attempt's number.

    Costs a constant number of queries. Call it in a transaction. `why` is by run id. Returns the
    moved runs by ascending id; each stays locked until the commit.
    """
    cleared = {
        "state": S,
        "wait_reason": "",
        "not_before": None,
        "requested": "",
        "keeps_place_until": None,
    }
    locked = Run.objects.select_for_update(no_key=True).filter(
        pk__in=[run.pk for run in runs], state=Q
    )
    moved = list(locked.order_by("pk"))
    Run.objects.filter(pk__in=[run.pk for run in moved]).update(
        attempt_number=F("attempt_number") + 1, **cleared
    )
    frames, fleet = {}, []
    new = {}
    for run in moved:
        for name, value in cleared.items():
            setattr(run, name, value)
        run.attempt_number += 1
        data = {"of": "run", "old": str(Q), "new": str(S), "by": "control plane"}
        data["why"] = why[run.pk]
        new[run.pk] = events.NewEvent("state_changed", data, attempt=run.attempt_number)
        frames[run.pk], of_fleet = live_frames.state_frames(run)
        fleet.append(of_fleet)
    first = events.record_each(new) if new else []
    pairs = zip(first, frames.values(), strict=True)
    live.append_many([*(frame for pair in pairs for frame in pair), *fleet])
    return moved


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
