"""Where ranks stand when nothing moves, and from that, who keeps the others waiting. Pure; both
sides judge by it.

A supervisor sees the ranks of its node; the control plane puts several nodes' standings together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from workers.contracts.wire.progress import NO_BEAT_S


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank.

    `marks` counts its steps forward within an attempt; `calls` the collectives it entered, by
    group.
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
        found = asdict(self)
        return {**found, "idle_s": round(self.idle_s, 1), "beat_s": round(self.beat_s, 1)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Standing:
        """Raises TypeError or ValueError for what is no standing."""
        known = {name: told[name] for name in cls.__slots__ if name in told}
        return cls(**{**known, "rank": int(told["rank"]), "calls": dict(told.get("calls") or {})})


@dataclass(frozen=True, slots=True)
class Judgement:
    """`behind` keep the others, `waiting`, from going on; `message` is by what one can tell.

    None may be singled out.
    """

    behind: tuple[Standing, ...]
    waiting: tuple[Standing, ...]
    message: str


def judge(standings: Sequence[Standing]) -> Judgement:
    """By the surest sign there is: no life, then collectives entered, then marks made by ranks of
    one stage.
    """
    lifeless = [each for each in standings if each.stopped or each.beat_s > NO_BEAT_S]
    if lifeless:
        how = "is stopped" if all(each.stopped for each in lifeless) else "shows no sign of life"
        return _told(standings, lifeless, how)
    late = _behind_in_collectives(standings)
    if late:
        return _told(standings, late, "has not come to the collective that the others are in")
    late = _behind_in_marks(standings)
    if late:
        return _told(standings, late, "has not come as far as the others")
    return Judgement((), tuple(standings), "all ranks seen stand at the same place")


def culprits_sentence(found: Judgement) -> str:
    """`rank 1 on node a (stage 0) is stopped, in forward of step 12 at decoder.py:80 forward; 3
    ranks wait for it`.
    """
    waiting = len(found.waiting)
    if not found.behind:
        return f"{found.message}, in {_place(found.waiting[0])}" if found.waiting else found.message
    first = found.behind[0]
    where = f" on node {first.node}" if first.node else ""
    ranks = ", ".join(str(each.rank) for each in found.behind[:8]) + (
        "…" if len(found.behind) > 8 else ""
    )
    who = f"rank {ranks}" if len(found.behind) == 1 else f"ranks {ranks}"
    awaited = f"; {waiting} rank{'s wait' if waiting > 1 else ' waits'} for it" if waiting else ""
    return f"{who}{where} (stage {first.stage}) {found.message}, in {_place(first)}{awaited}"


def _place(standing: Standing) -> str:
    line = f" at {standing.where}" if standing.where else ""
    return f"{standing.phase} of step {standing.step + 1}{line}"


def _told(all_: Sequence[Standing], behind: Iterable[Standing], message: str) -> Judgement:
    found = tuple(sorted(behind, key=lambda each: each.rank))
    ranks = {each.rank for each in found}
    return Judgement(found, tuple(each for each in all_ if each.rank not in ranks), message)


def _behind_in_collectives(standings: Sequence[Standing]) -> list[Standing]:
    """Those whom somebody waits for and who wait for nobody themselves."""
    top: dict[str, int] = {}
    for each in standings:
        for group, number in each.calls.items():
            top[group] = max(top.get(group, 0), number)
    behind = {
        each.rank
        for each in standings
        if any(number < top[group] for group, number in each.calls.items())
    }
    awaited = {
        group for each in standings for group, number in each.calls.items() if number < top[group]
    }
    waits = {
        each.rank
        for each in standings
        if any(group in awaited and number == top[group] for group, number in each.calls.items())
    }
    first = behind - waits or behind
    return [each for each in standings if each.rank in first]


def _behind_in_marks(standings: Sequence[Standing]) -> list[Standing]:
    """Ranks of one stage make the same marks; other stages take micro-batches in another order."""
    found = []
    for stage in {each.stage for each in standings}:
        peers = [each for each in standings if each.stage == stage]
        furthest = max((each.step, each.marks) for each in peers)
        found += [each for each in peers if (each.step, each.marks) < furthest]
    return found
