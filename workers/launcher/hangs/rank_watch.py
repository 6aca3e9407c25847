"""Looks after a node's ranks by their beacons: when nothing moves any more, who stands where, and
who is always late.

Decides when to speak, not what follows. Reads small files only; a rank that never showed itself is
not judged.
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
from workers.launcher.hangs.stragglers import Lateness
from workers.launcher.rundir import read_json

# told within 3 times a step, and 10 s at the least: what is read and sent takes some of it
LEAST_S = 8.0
USUAL_TIMES = 2.5  # times what a step, or the longest pause so far in this phase, took
AGAIN_S = 30.0  # between alarms of one stall
_LOOK_S = 0.5
_FIRST_STEPS = 2  # compile, allocate, connect: as long as they take
# of every step; others (starting, validation, checkpoint, …) take as long as they take, until one
# has come to an end
_OF_A_STEP = frozenset({"forward", "backward", "update", "record"})
_IDLE = "idle"  # a server without requests: it goes on making marks


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing has moved for `quiet_s`, which is more than `limit_s`."""

    quiet_s: float
    limit_s: float
    standings: tuple[RankProgress, ...]
    judgement: StallDiagnosis
    again: bool


@dataclass(frozen=True, slots=True)
class Late:
    """The others wait for `standing`'s rank a `share` of the time; it comes `mean_s` after them."""

    share: float
    mean_s: float
    standing: RankProgress


@dataclass(frozen=True, slots=True)
class Over:
    """A stall that ended by itself after `quiet_s`."""

    quiet_s: float
    judgement: StallDiagnosis


class Watch:
    """`look()` each turn: a Stall, its being Over, a rank that is Late, or nothing.

    Ranks that do not work `together` (replicas of a server) are watched each by itself: one that
    stands is enough.
    """

    def __init__(
        self,
        folder: Callable[[int], Path],
        ranks: Iterable[int],
        *,
        stage_of: Callable[[int], int],
        node: str,
        together: bool = True,
    ) -> None:
        self._folder, self._ranks, self._stage_of, self._node = folder, list(ranks), stage_of, node
        self._together = together
        # since any rank's last mark; None before all have shown themselves
        self.quiet_s: float | None = None
        self.step_s = 0.0  # a usual step, once there were some
        self.stall: Stall | None = None
        self._next = self._spoke = 0.0
        self._first_step: int | None = None
        self._steps: deque[float] = deque(maxlen=20)
        self._at: tuple[int, float] | None = None  # newest step, and when it was first seen
        self._seen: dict[int, Progress] = {}
        self._before: dict[int, Progress] = {}  # at the look before
        # phase → longest time without a mark that came to an end
        self._longest: dict[str, float] = {}
        self._pulse_time = 0.0
        self._lateness = Lateness()

    def look(self, now: float | None = None) -> Stall | Late | Over | None:
        now = time.monotonic() if now is None else now
        if now < self._next:
            return None
        self._next = now + _LOOK_S
        read = {
            rank: read_progress(self._folder(rank), now_ns=int(now * 1e9)) for rank in self._ranks
        }
        seen = {rank: each for rank, each in read.items() if each is not None}
        if len(seen) < len(self._ranks):
            return None
        moved = [
            rank
            for rank, each in seen.items()
            if rank in self._seen and each.marks != self._seen[rank].marks
        ]
        # what was told as a stall is nothing to compare with
        for rank in moved if self.stall is None else ():
            before = self._seen[rank]
            if before.phase not in _OF_A_STEP:
                self._longest[before.phase] = max(
                    self._longest.get(before.phase, 0.0), before.idle_s
                )
        self._before, self._seen = self._seen, seen
        self._count_steps(min(each.step for each in seen.values()), now)
        self.quiet_s = (min if self._together else max)(each.idle_s for each in seen.values())
        stands = not self._together and self.stall is not None and self.quiet_s > self.stall.limit_s
        if self.stall is not None and moved and not stands:
            over, self.stall = self.stall, None
            return Over(over.quiet_s + now - self._spoke, over.judgement)
        limit_s = self.limit_s()
        if limit_s is not None and self.quiet_s > limit_s:
            return self._stalled(now, limit_s)
        return self._late()

    @property
    def in_a_step(self) -> bool:
        """Whether steps have a usual length by now, and all ranks seem to be in one."""
        return bool(self._steps) and all(each.phase in _OF_A_STEP for each in self._seen.values())

    def limit_s(self) -> float | None:
        """How long nothing may move; None where only patience helps: at the start, in first steps,
        in a first save.
        """
        phases = {each.phase for each in self._seen.values()}
        if not self._steps or not all(
            phase in _OF_A_STEP or phase in self._longest for phase in phases
        ):
            return None
        usual_s = max([self.step_s, *(self._longest.get(phase, 0.0) for phase in phases)])
        return max(LEAST_S, USUAL_TIMES * usual_s)

    def standings(self) -> tuple[RankProgress, ...]:
        """Every rank of this node as it stands now."""
        return tuple(self._standing(rank, each) for rank, each in sorted(self._seen.items()))

    def _stalled(self, now: float, limit_s: float) -> Stall | None:
        if self.stall is not None and now - self._spoke < AGAIN_S:
            return None
        standings = self.standings()
        again = self.stall is not None
        stand = tuple(each for each in standings if each.idle_s > limit_s)
        found = diagnose_stall(standings) if self._together else StallDiagnosis(stand, (), "stands")
        self.stall = Stall(self.quiet_s or 0.0, limit_s, standings, found, again)
        self._spoke = now
        return self.stall

    def _standing(self, rank: int, progress: Progress) -> RankProgress:
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
            # of an earlier mark else
            where=pulse.where if time.time() - pulse.time < progress.idle_s else "",
            calls=pulse.calls,
        )

    def _count_steps(self, step: int, now: float) -> None:
        if self._first_step is None:
            self._first_step = step
        if self._at is None or step > self._at[0]:
            idled = any(each.phase == _IDLE for each in self._before.values())
            if (
                self._at is not None
                and self._at[0] >= self._first_step + _FIRST_STEPS
                and not idled
            ):
                self._steps.append((now - self._at[1]) / (step - self._at[0]))
                self.step_s = median(self._steps)
            self._at = (step, now)

    def _late(self) -> Late | None:
        """At each new pulse; those of a node's ranks are taken at the same seconds."""
        if len(self._ranks) < 2 or not self._steps:
            return None
        first = self._folder(self._ranks[0]) / "pulse.json"
        try:
            stamp = first.stat().st_mtime
        except OSError:
            return None
        # the others are about to write theirs
        if stamp == self._pulse_time or time.time() - stamp < _LOOK_S:
            return None
        self._pulse_time = stamp
        found = self._lateness.look(
            {rank: read_pulse(self._folder(rank)).arrivals for rank in self._ranks}
        )
        return (
            None
            if found is None
            else Late(found.share, found.mean_s, self._standing(found.rank, self._seen[found.rank]))
        )


def named(standing: RankProgress) -> dict[str, Any]:
    """A standing in an event: without the counters that only a judge reads."""
    data = standing.to_dict()
    return {
        key: data[key] for key in ("rank", "node", "stage", "step", "phase", "micro_batch", "where")
    }


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger (Linux)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
