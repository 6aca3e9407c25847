"""Watches a node's ranks by their beacons: detects stalls and stragglers.

Does not decide what follows. Reads small files only; a rank without a beacon is not judged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from workers.contracts.wire.progress import Progress, Pulse, read_progress, read_pulse
from workers.contracts.wire.rank_progress import RankProgress, StallDiagnosis, diagnose_stall
from workers.launcher.hangs.stragglers import StragglerDetector
from workers.launcher.rundir import read_json

# a stall is reported within 3 steps, at least 10 s, including the time to read and send
MIN_LIMIT_S = 8.0
LIMIT_FACTOR = 2.5  # times the duration of a step, or the longest pause so far in this phase
REPEAT_S = 30.0  # between reports of one stall
_LOOK_S = 0.5
_FIRST_STEPS = 2  # compile, allocate, connect: without a limit
# phases of every step; others (starting, validation, checkpoint, …) have no limit until one of them
# has completed
_STEP_PHASES = frozenset({"forward", "backward", "update", "record"})
_IDLE = "idle"  # a server without requests; it keeps making marks


@dataclass(frozen=True, slots=True)
class Stall:
    """No rank made progress for `quiet_s`, which is above `limit_s`."""

    quiet_s: float
    limit_s: float
    rank_progress: tuple[RankProgress, ...]
    diagnosis: StallDiagnosis
    repeated: bool


@dataclass(frozen=True, slots=True)
class Straggler:
    """The others wait a `share` of the time for this rank; it arrives `mean_s` after them."""

    share: float
    mean_s: float
    progress: RankProgress


@dataclass(frozen=True, slots=True)
class StallOver:
    """A stall that ended by itself after `quiet_s`."""

    quiet_s: float
    diagnosis: StallDiagnosis


class RankWatch:
    """Call `look()` regularly: it returns a Stall, a StallOver, a Straggler, or None.

    Ranks that are not `synchronized` (replicas of a server) are judged each by itself.
    """

    def __init__(
        self,
        folder: Callable[[int], Path],
        ranks: Iterable[int],
        *,
        pipeline_stage: Callable[[int], int],
        node: str,
        synchronized: bool = True,
    ) -> None:
        self._folder, self._ranks, self._stage_of, self._node = (
            folder,
            list(ranks),
            pipeline_stage,
            node,
        )
        self._synchronized = synchronized
        # since the last mark of any rank; None before all ranks have a beacon
        self.quiet_s: float | None = None
        self.step_s = 0.0  # the median step
        self.stall: Stall | None = None
        self._next = self._reported_at = 0.0
        self._first_step: int | None = None
        self._steps: deque[float] = deque(maxlen=20)
        self._at: tuple[int, float] | None = None  # newest step, and when it was first seen
        self._seen: dict[int, Progress] = {}
        self._before: dict[int, Progress] = {}  # at the previous look
        # phase → longest completed time without a mark
        self._longest: dict[str, float] = {}
        self._pulse_time = 0.0
        self._stragglers = StragglerDetector()

    def look(self, now: float | None = None) -> Stall | Straggler | StallOver | None:
        """Read the beacons, at most every _LOOK_S."""
        now = time.monotonic() if now is None else now
        if now < self._next:
            return None
        self._next = now + _LOOK_S
        read = {
            rank: read_progress(self._folder(rank), now_ns=int(now * 1e9)) for rank in self._ranks
        }
        seen = {rank: progress for rank, progress in read.items() if progress is not None}
        if len(seen) < len(self._ranks):
            return None
        moved = [
            rank
            for rank, progress in seen.items()
            if rank in self._seen and progress.marks != self._seen[rank].marks
        ]
        # a reported stall does not raise the limit
        for rank in moved if self.stall is None else ():
            before = self._seen[rank]
            if before.phase not in _STEP_PHASES:
                self._longest[before.phase] = max(
                    self._longest.get(before.phase, 0.0), before.idle_s
                )
        self._before, self._seen = self._seen, seen
        self._count_steps(min(progress.step for progress in seen.values()), now)
        idle_s = [progress.idle_s for progress in seen.values()]
        self.quiet_s = min(idle_s) if self._synchronized else max(idle_s)
        stalled = (
            not self._synchronized and self.stall is not None and self.quiet_s > self.stall.limit_s
        )
        if self.stall is not None and moved and not stalled:
            over, self.stall = self.stall, None
            return StallOver(over.quiet_s + now - self._reported_at, over.diagnosis)
        limit_s = self.limit_s()
        if limit_s is not None and self.quiet_s > limit_s:
            return self._report_stall(now, limit_s)
        return self._find_straggler()

    @property
    def in_a_step(self) -> bool:
        """Whether the step duration is known and all ranks are in a step."""
        phases = {progress.phase for progress in self._seen.values()}
        return bool(self._steps) and phases <= _STEP_PHASES

    def limit_s(self) -> float | None:
        """Seconds without progress that count as a stall; None if unknown: at the start, in first
        steps, in a first save.
        """
        phases = {progress.phase for progress in self._seen.values()}
        if not self._steps or not all(
            phase in _STEP_PHASES or phase in self._longest for phase in phases
        ):
            return None
        usual_s = max([self.step_s, *(self._longest.get(phase, 0.0) for phase in phases)])
        return max(MIN_LIMIT_S, LIMIT_FACTOR * usual_s)

    def rank_progress(self) -> tuple[RankProgress, ...]:
        """The progress of every rank of this node."""
        return tuple(
            self._rank_progress(rank, progress) for rank, progress in sorted(self._seen.items())
        )

    def _report_stall(self, now: float, limit_s: float) -> Stall | None:
        if self.stall is not None and now - self._reported_at < REPEAT_S:
            return None
        rank_progress = self.rank_progress()
        repeated = self.stall is not None
        if self._synchronized:
            diagnosis = diagnose_stall(rank_progress)
        else:
            behind = tuple(progress for progress in rank_progress if progress.idle_s > limit_s)
            diagnosis = StallDiagnosis(behind, (), "stands")
        self.stall = Stall(self.quiet_s or 0.0, limit_s, rank_progress, diagnosis, repeated)
        self._reported_at = now
        return self.stall

    def _rank_progress(self, rank: int, progress: Progress) -> RankProgress:
        pulse: Pulse = read_pulse(self._folder(rank))
        pid = read_json(self._folder(rank) / "process.json").get("pid")
        return RankProgress(
            rank=rank,
            node=self._node,
            stage=self._stage_of(rank),
            step=progress.step,
            phase=progress.phase,
            idle_s=progress.idle_s,
            beat_s=progress.beat_s,
            micro_batch=progress.micro_batch,
            marks=progress.marks,
            stopped=pid is not None and is_stopped(int(pid)),
            # an older pulse belongs to an earlier mark
            where=pulse.where if time.time() - pulse.time < progress.idle_s else "",
            calls=pulse.calls,
        )

    def _count_steps(self, step: int, now: float) -> None:
        if self._first_step is None:
            self._first_step = step
        if self._at is None or step > self._at[0]:
            idled = any(progress.phase == _IDLE for progress in self._before.values())
            if (
                self._at is not None
                and self._at[0] >= self._first_step + _FIRST_STEPS
                and not idled
            ):
                self._steps.append((now - self._at[1]) / (step - self._at[0]))
                self.step_s = median(self._steps)
            self._at = (step, now)

    def _find_straggler(self) -> Straggler | None:
        """Compare arrivals at each new pulse; a node's ranks write theirs at the same seconds."""
        if len(self._ranks) < 2 or not self._steps:
            return None
        first = self._folder(self._ranks[0]) / "pulse.json"
        try:
            stamp = first.stat().st_mtime
        except OSError:
            return None
        # the other ranks are about to write theirs
        if stamp == self._pulse_time or time.time() - stamp < _LOOK_S:
            return None
        self._pulse_time = stamp
        result = self._stragglers.look(
            {rank: read_pulse(self._folder(rank)).arrivals for rank in self._ranks}
        )
        if result is None:
            return None
        progress = self._rank_progress(result.rank, self._seen[result.rank])
        return Straggler(result.share, result.mean_s, progress)


def event_fields(progress: RankProgress) -> dict[str, Any]:
    """A rank's progress in an event, without the counters that only the diagnosis reads."""
    data = progress.to_dict()
    return {
        key: data[key] for key in ("rank", "node", "stage", "step", "phase", "micro_batch", "where")
    }


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger stopped the process (Linux)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
