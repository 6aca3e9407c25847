"""Which waiting runs get which devices now, and one sentence for each that goes on waiting. Pure:
no database.

Gangs are placed whole or not at all. Priority, then time in the queue; smaller runs may pass a big
one for a while,
then devices are kept for it. Does not know how an attempt is started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from orchestrator.scheduling.placement import reasons
from orchestrator.scheduling.placement.capacity import Lane, NodeView, Room, Slot, rooms_by_pool

__all__ = ["Decision", "NodeView", "Placement", "Share", "Slot", "Wait", "Waiting", "place"]

# a run that has waited so long at the head of its pool gets the next devices
RESERVE_AFTER_S = 60.0
# how far down its pool's line a head is looked for, past runs that wait for something else than
# devices
HEADS = 8
ESTIMATED = 200  # waiting runs of a pool whose start is estimated; nobody plans with the rest


@dataclass(frozen=True)
class Waiting:
    """A queued run. `keep` are the nodes that hold its checkpoint, where only they have it."""

    run: int
    devices: int
    pool: str
    queued_at: float  # Unix seconds
    priority: int = 0
    owner: str = ""
    device: str | None = None
    not_before: float | None = None
    max_seconds: float | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class Share:
    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    run: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Wait:
    """`may_start` (Unix seconds) is when all before it are done at the latest; None where nobody
    can tell.
    """

    run: int
    position: int
    reason: str
    may_start: float | None = None


@dataclass(frozen=True)
class Decision:
    placements: tuple[Placement, ...] = ()
    waits: tuple[Wait, ...] = ()


def place(
    queue: Sequence[Waiting],
    nodes: Sequence[NodeView],
    now: datetime,
    *,
    quotas: Mapping[str, int] | None = None,
    pool_priority: Mapping[str, int] | None = None,
    estimated: int = ESTIMATED,
) -> Decision:
    """`quotas` is the most devices one owner may hold in a pool.

    The same input gives the same decision.
    """
    one_pass = _Pass(
        sorted(nodes, key=lambda node: node.name),
        now.timestamp(),
        quotas or {},
        max(HEADS, estimated),
    )
    weight = pool_priority or {}
    for run in sorted(
        queue, key=lambda run: (-run.priority, -weight.get(run.pool, 0), run.queued_at, run.run)
    ):
        one_pass.consider(run)
    return Decision(tuple(one_pass.placements), tuple(one_pass.waits))


@dataclass
class _Head:
    """The run that has the next devices of its pool, and when it starts at the latest."""

    run: int
    start: float


class _Pass:
    """What one pass has decided so far, in memory."""

    def __init__(
        self, nodes: list[NodeView], now: float, quotas: Mapping[str, int], estimated: int
    ) -> None:
        self.placements: list[Placement] = []
        self.waits: list[Wait] = []
        self._nodes, self._now, self._quotas, self._estimated = nodes, now, quotas, estimated
        self._by_name = {node.name: node for node in nodes}
        self._rooms = rooms_by_pool(nodes, now)
        self._heads: dict[str, _Head] = {}
        self._line: dict[str, int] = {}  # how many runs of a pool wait so far
        self._held: dict[tuple[str, str], int] = {}
        self._facts: dict[tuple[str, str], tuple[int, str]] = {}
        for node in nodes:
            for slot in node.slots:
                if slot.run is not None:
                    self._held[node.pool, slot.owner] = (
                        self._held.get((node.pool, slot.owner), 0) + 1
                    )

    def consider(self, run: Waiting) -> None:
        """Places the run, or notes why not."""
        has, quota = self._held.get((run.pool, run.owner), 0), self._quotas.get(run.pool)
        if run.not_before is not None and run.not_before > self._now:
            return self._wait(run, reasons.back_off(run.not_before), self._candidates(run))
        if quota is not None and has + run.devices > quota:
            return self._wait(run, reasons.over_quota(run, quota, has), [])
        away = [
            name
            for name in run.keep
            if name in self._by_name and self._by_name[name].away == "silent"
        ]
        if away:
            return self._wait(run, reasons.checkpoint_away(run, away), [])
        rooms, head = self._candidates(run), self._heads.get(run.pool)
        # a short run may use what is kept for the head if it is gone by then
        passing = (
            head is not None
            and run.max_seconds is not None
            and self._now + run.max_seconds <= head.start
        )
        for room in rooms:
            if lanes := room.gang(run.devices, run.keep, passing=passing):
                return self._place(run, lanes)
        return self._wait(run, self._why(run, rooms, head), rooms)

    def _candidates(self, run: Waiting) -> list[Room]:
        """Rooms of the pool and kind; on the checkpoint's nodes alone while those take work."""
        rooms = [room for room in self._rooms.get(run.pool, []) if run.device in (None, room.kind)]
        if run.keep and all(
            name in self._by_name and self._by_name[name].usable for name in run.keep
        ):
            kept = [part for room in rooms if (part := room.only(run.keep)).lanes]
            return kept or rooms
        return rooms

    def _place(self, run: Waiting, lanes: list[Lane]) -> None:
        per = run.devices // len(lanes)
        until = self._now + run.max_seconds if run.max_seconds is not None else math.inf
        shares = tuple(Share(lane.node, lane.take(run.run, per, until)) for lane in lanes)
        self.placements.append(Placement(run.run, shares))
        self._held[run.pool, run.owner] = self._held.get((run.pool, run.owner), 0) + run.devices
        self._changed(run.pool)

    def _wait(self, run: Waiting, reason: str, rooms: list[Room]) -> None:
        self._line[run.pool] = position = self._line.get(run.pool, 0) + 1
        start = (
            self._book(run, rooms, head=position <= HEADS) if position <= self._estimated else None
        )
        self.waits.append(Wait(run.run, len(self.waits) + 1, reason, start))

    def _book(self, run: Waiting, rooms: list[Room], *, head: bool) -> float | None:
        """When the run starts at the latest; books those devices, and keeps them for a pool's first
        long waiter.
        """
        found = [best for room in rooms if (best := room.earliest(run.devices)) is not None]
        if not found:
            return None
        free_at, lanes = min(found, key=lambda item: item[0])
        ready = run.not_before or 0.0
        start, per = max(self._now, free_at, ready), run.devices // len(lanes)
        late = self._now - run.queued_at >= RESERVE_AFTER_S and ready <= self._now
        if head and late and run.pool not in self._heads:
            self._heads[run.pool] = _Head(run.run, start)
            for lane in lanes:
                lane.kept = per
            self._changed(run.pool)
        for lane in lanes:
            lane.book(per, start + run.max_seconds if run.max_seconds is not None else math.inf)
        return start if math.isfinite(start) else None

    def _changed(self, pool: str) -> None:
        for room in self._rooms[pool]:
            room.changed()
        self._facts = {key: facts for key, facts in self._facts.items() if key[0] != pool}

    def _why(self, run: Waiting, rooms: list[Room], head: _Head | None) -> str:
        """The sentence for a run that no kind of device has room for."""
        if not rooms:
            return reasons.nowhere(run, self._nodes)
        room = max(rooms, key=lambda room: room.total)
        if room.total < run.devices:
            return reasons.no_room(run, room.total, self._nodes)
        if not room.ever_even(run.devices):
            return reasons.unequal(run, room.sizes, ever=True)
        free, holders = self._free_and_holders(run, room)
        if free >= run.devices:
            if head is not None and room.open(passing=False) < free:
                return reasons.behind(run, head.run, free)
            return reasons.unequal(run, room.frees, ever=False)
        return reasons.busy(run, free, room.total, holders)

    def _free_and_holders(self, run: Waiting, room: Room) -> tuple[int, str]:
        """Free devices and who holds the rest, in words; the same for every run that may use the
        whole room.
        """
        key = (run.pool, room.kind)
        if run.keep or key not in self._facts:
            holders: dict[int, int] = {}
            for lane in room.lanes:
                for holder, count in lane.holders.items():
                    holders[holder] = holders.get(holder, 0) + count
            facts = room.open(passing=True), reasons.holding(holders)
            if run.keep:
                return facts
            self._facts[key] = facts
        return self._facts[key]
