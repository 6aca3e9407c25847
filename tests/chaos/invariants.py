"""Checks after the faults: reads the database, the run directories and the ranks' journal.

Every function returns violations as sentences. Changes nothing.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.models import Allocation
from orchestrator.telemetry import selectors as telemetry
from orchestrator.telemetry.models import Cursor
from workers.contracts.wire.node_messages import AttemptState, RunState


class Life(NamedTuple):
    """What one rank process wrote into its journal; times are Unix seconds."""

    fence: str
    run: str
    attempt: int
    rank: int
    node: str
    local_rank: int
    first: float
    last: float
    starts: int


@dataclass(frozen=True)
class Evidence:
    """Where the checks read."""

    nodes_home: Path
    journal: Path
    cancelled: frozenset[int]  # runs that were cancelled on request
    partitioned: frozenset[str]  # nodes that were cut off for a while


def violations(evidence: Evidence) -> list[str]:
    """All violated invariants; empty if none is."""
    lives = read_journal(evidence.journal)
    return [
        *final_states(evidence),
        *nothing_lost(evidence.partitioned),
        *complete_series(),
        *every_point_once(evidence.nodes_home),
        *one_owner_per_device(),
        *one_attempt_at_a_time(lives),
        *started_once(lives),
    ]


def read_journal(folder: Path) -> list[Life]:
    """One entry per rank of an attempt."""
    lives = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = complete_lines(path)
        if not rows:
            continue
        head = rows[0]
        lives.append(
            Life(
                fence=path.stem.rpartition("-")[0],
                run=head["run"],
                attempt=head["attempt"],
                rank=head["rank"],
                node=head["node"],
                local_rank=head["local_rank"],
                first=head["time"],
                last=rows[-1]["time"],
                starts=sum(row["kind"] == "start" for row in rows),
            )
        )
    return lives


def final_states(evidence: Evidence) -> list[str]:
    """Every run finished, or was cancelled on request; nothing is open."""
    problems = []
    for run in Run.objects.all():
        allowed = {RunState.FINISHED}
        if run.pk in evidence.cancelled:
            allowed.add(RunState.CANCELLED)
        if run.state not in allowed:
            problems.append(f"run {run.pk} ended as {run.state}: {run.exit}")
        if run.attempts.count() != run.attempt_number:
            problems.append(f"run {run.pk} has {run.attempts.count()} of {run.attempt_number}")
    for attempt in Attempt.objects.exclude(state=AttemptState.EXITED):
        problems.append(f"attempt {attempt} is still {attempt.state}")
    for allocation in Allocation.objects.filter(released=None):
        problems.append(f"device {allocation.device_id} is still held by {allocation.attempt_id}")
    return problems


def nothing_lost(partitioned: frozenset[str]) -> list[str]:
    """No attempt ended as lost, except on a node that was cut off: the rest were outages."""
    return [
        f"attempt {attempt} was declared lost: {(attempt.exit or {}).get('reason')}"
        for attempt in Attempt.objects.filter(exit_class="lost")
        if not partitioned & {share["node"] for share in attempt.placement}
    ]


def complete_series() -> list[str]:
    """A finished run shows every step from 1 to its last, each once."""
    problems = []
    for run in Run.objects.filter(state=RunState.FINISHED, kind="train"):
        steps = int(run.spec["train"]["steps"])
        shown = telemetry.series(run=run, name="loss", points=5000).x
        if list(shown) != [float(step) for step in range(1, steps + 1)]:
            missing = sorted(set(range(1, steps + 1)) - {int(step) for step in shown})
            problems.append(f"run {run.pk} shows {len(shown)} of {steps} steps; missing {missing}")
    return problems


def every_point_once(nodes_home: Path) -> list[str]:
    """The database holds each line of every rank's `points.jsonl`, and each once."""
    problems = []
    for path in nodes_home.glob("runs/*/attempt-*/**/rank-*/points.jsonl"):
        parts = path.relative_to(nodes_home / "runs").parts
        run_id, attempt = int(parts[0]), int(parts[1].removeprefix("attempt-"))
        rank, written = int(parts[-2].removeprefix("rank-")), len(complete_lines(path))
        if not written:
            continue
        run = Run.objects.get(pk=run_id)
        stored = telemetry.series(run=run, name="loss", rank=rank, attempt=attempt, points=5000)
        cursor = Cursor.objects.filter(run=run, attempt=attempt, rank=rank, stream="points").first()
        ranges = json.loads(cursor.ranges) if cursor is not None else []
        if stored.total_points != written or ranges != [[1, written]]:
            problems.append(
                f"run {run_id} attempt {attempt} rank {rank} wrote {written} points; "
                f"{stored.total_points} are stored, numbers {ranges}"
            )
    return problems


def one_owner_per_device() -> list[str]:
    """No two attempts hold a device at the same time."""
    problems = []
    held: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in Allocation.objects.order_by("created", "id"):
        held[allocation.device_id].append(allocation)
    for device, allocations in held.items():
        for earlier, later in itertools.pairwise(allocations):
            if earlier.released is None or earlier.released > later.created:
                problems.append(
                    f"device {device} was held by attempts {earlier.attempt_id} and "
                    f"{later.attempt_id} at once"
                )
    return problems


def one_attempt_at_a_time(lives: list[Life]) -> list[str]:
    """A rank of an older attempt writes nothing after a newer attempt's first rank started."""
    problems = []
    runs: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        runs[life.run].append(life)
    for run, members in runs.items():
        first = {
            attempt: min(life.first for life in members if life.attempt == attempt)
            for attempt in {life.attempt for life in members}
        }
        for life in members:
            overlapping = [
                number for number, at in first.items() if number > life.attempt and at < life.last
            ]
            if overlapping:
                problems.append(
                    f"run {run}: rank {life.rank} of attempt {life.attempt} on {life.node} still "
                    f"ran {life.last - first[overlapping[0]]:.1f} s after attempt "
                    f"{overlapping[0]} had started"
                )
    return problems


def started_once(lives: list[Life]) -> list[str]:
    """Each rank of an attempt starts at most once, and on one node."""
    problems = [
        f"run {life.run} attempt {life.attempt} rank {life.rank} started {life.starts} times"
        for life in lives
        if life.starts != 1
    ]
    fences: dict[tuple[str, int], set[str]] = defaultdict(set)
    for life in lives:
        fences[life.run, life.attempt].add(life.fence)
    problems += [
        f"run {run} attempt {attempt} has {len(names)} fences"
        for (run, attempt), names in fences.items()
        if len(names) > 1
    ]
    return problems


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; a killed writer may leave a part of one."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    return [json.loads(line) for line in text.rpartition(b"\n")[0].splitlines() if line.strip()]
