"""Progress of each rank of a stalled run, and from it which ranks keep the others waiting.

Pure functions, used by both sides: a supervisor sees the ranks of its node, the control plane
combines several nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from workers.contracts.wire.progress import NO_BEAT_S


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one rank.

    `marks` counts its marks within an attempt; `calls` the collectives it entered, by group.
    """

    rank: int
    step: int
    phase: str
    idle_s: float
    beat_s: float = 0.0
    stage: int = 0
    micro_batch: int = 0
    marks: int = 0
    stopped: bool = False
    where: str = ""
    node: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, seconds rounded."""
        return {**asdict(self), "idle_s": round(self.idle_s, 1), "beat_s": round(self.beat_s, 1)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankProgress:
        """From `to_dict`. Raises TypeError or ValueError for anything else."""
        known = {name: data[name] for name in cls.__slots__ if name in data}
        return cls(**{**known, "rank": int(data["rank"]), "calls": dict(data.get("calls") or {})})


@dataclass(frozen=True, slots=True)
class StallDiagnosis:
    """Ranks `behind` keep the ranks `waiting` from continuing; `message` gives the evidence.

    `behind` is empty if no rank can be identified.
    """

    behind: tuple[RankProgress, ...]
    waiting: tuple[RankProgress, ...]
    message: str


def diagnose_stall(ranks: Sequence[RankProgress]) -> StallDiagnosis:
    """By the strongest evidence: missing beats, then collectives entered, then marks in a stage."""
    lifeless = [rank for rank in ranks if rank.stopped or rank.beat_s > NO_BEAT_S]
    if lifeless:
        stopped = all(rank.stopped for rank in lifeless)
        return _diagnosis(ranks, lifeless, "is stopped" if stopped else "shows no sign of life")
    late = _behind_in_collectives(ranks)
    if late:
        return _diagnosis(ranks, late, "has not entered the collective that the others are in")
    late = _behind_in_marks(ranks)
    if late:
        return _diagnosis(ranks, late, "has made less progress than the others")
    return StallDiagnosis((), tuple(ranks), "all observed ranks have made the same progress")


def describe_culprits(diagnosis: StallDiagnosis) -> str:
    """The diagnosis as one message.

    E.g. `rank 1 on node a (stage 0) is stopped, in forward of step 12 at decoder.py:80 forward; 3
    ranks wait for it`.
    """
    behind, waiting = diagnosis.behind, diagnosis.waiting
    if not behind:
        place = f", in {_place(waiting[0])}" if waiting else ""
        return diagnosis.message + place
    first = behind[0]
    node = f" on node {first.node}" if first.node else ""
    numbers = ", ".join(str(rank.rank) for rank in behind[:8]) + ("…" if len(behind) > 8 else "")
    label = f"rank {numbers}" if len(behind) == 1 else f"ranks {numbers}"
    count = f"; {len(waiting)} rank{'s wait' if len(waiting) > 1 else ' waits'} for it"
    message = f"{label}{node} (stage {first.stage}) {diagnosis.message}, in {_place(first)}"
    return message + (count if waiting else "")


def _place(rank: RankProgress) -> str:
    line = f" at {rank.where}" if rank.where else ""
    return f"{rank.phase} of step {rank.step + 1}{line}"


def _diagnosis(
    ranks: Sequence[RankProgress], behind: Iterable[RankProgress], message: str
) -> StallDiagnosis:
    ordered = tuple(sorted(behind, key=lambda rank: rank.rank))
    numbers = {rank.rank for rank in ordered}
    waiting = tuple(rank for rank in ranks if rank.rank not in numbers)
    return StallDiagnosis(ordered, waiting, message)


def _behind_in_collectives(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    """Ranks that others wait for and that do not wait themselves."""
    top: dict[str, int] = {}
    for rank in ranks:
        for group, number in rank.calls.items():
            top[group] = max(top.get(group, 0), number)
    behind = {
        rank.rank
        for rank in ranks
        if any(number < top[group] for group, number in rank.calls.items())
    }
    awaited = {
        group for rank in ranks for group, number in rank.calls.items() if number < top[group]
    }
    waits = {
        rank.rank
        for rank in ranks
        if any(group in awaited and number == top[group] for group, number in rank.calls.items())
    }
    first = behind - waits or behind
    return [rank for rank in ranks if rank.rank in first]


def _behind_in_marks(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    """Ranks with fewer marks than others of their stage.

    Stages process micro-batches in different orders, so their marks are not compared.
    """
    late = []
    for stage in {rank.stage for rank in ranks}:
        peers = [rank for rank in ranks if rank.stage == stage]
        furthest = max((rank.step, rank.marks) for rank in peers)
        late += [rank for rank in peers if (rank.step, rank.marks) < furthest]
    return late
