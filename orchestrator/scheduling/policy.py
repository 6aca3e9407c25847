"""Which waiting runs get which devices now, and one sentence for each that goes on waiting. Pure: no database.

Gangs are placed whole or not at all. Priority, then time in the queue; smaller runs may pass a big one for a while,
then devices are kept for it. Does not know how an attempt is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from orchestrator.scheduling.reasons import (
    back_off,
    behind,
    busy,
    checkpoint_away,
    no_room,
    nowhere,
    over_quota,
    unequal,
)

RESERVE_AFTER_S = 60.0  # a run that has waited so long at the head of its pool gets the next devices
ESTIMATED = 200  # waiting runs of a pool whose start is estimated; nobody plans with the rest


@dataclass(frozen=True)
class Slot:
    """One healthy device. `run` holds it, at the latest until `until` (Unix seconds) where that is known."""

    index: int
    kind: str  # its catalogue name, or its product's
    gpu: bool = False
    run: int | None = None
    owner: str = ""
    until: float | None = None


@dataclass(frozen=True)
class NodeView:
    name: str
    pool: str
    slots: tuple[Slot, ...]
    usable: bool = True  # up and not drained
    away: str = ""  # why not: "drained", "silent", "lost"


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
    run: int
    position: int
    reason: str
    may_start: float | None = None  # Unix seconds


@dataclass(frozen=True)
class Decision:
    placements: tuple[Placement, ...] = ()
    waits: tuple[Wait, ...] = ()


@dataclass
class _Lane:
    """The devices of one kind on one usable node, with when each is free at the latest (inf: nobody knows)."""

    node: str
    kind: str
    gpu: bool
    slots: tuple[Slot, ...]
    free: list[int]
    free_at: list[float]
    taken: dict[int, int] = field(default_factory=dict)  # by runs that this very pass has placed
    kept: int = 0  # free devices that are kept for a run at the head

    @property
    def open(self) -> int:
        return max(0, len(self.free) - self.kept)


@dataclass
class _Head:
    run: int
    start: float
    lanes: frozenset[int] = field(default_factory=frozenset)


def place(
    queue: Sequence[Waiting],
    nodes: Sequence[NodeView],
    now: datetime,
    *,
    quotas: Mapping[str, int] | None = None,
    pool_priority: Mapping[str, int] | None = None,
) -> Decision:
    """`quotas` is the most devices one owner may hold in a pool. The same input gives the same decision."""
    clock = now.timestamp()
    weight = pool_priority or {}
    order = sorted(queue, key=lambda run: (-run.priority, -weight.get(run.pool, 0), run.queued_at, run.run))
    nodes = sorted(nodes, key=lambda node: node.name)
    pools: dict[str, list[_Lane]] = {}
    for node in nodes:
        pools.setdefault(node.pool, [])
        if node.usable:
            pools[node.pool] += _lanes(node, clock)
    held = _held(nodes)
    heads: dict[str, _Head] = {}
    counted: dict[str, int] = {}
    placements: list[Placement] = []
    waits: list[Wait] = []
    for run in order:
        lanes, head = pools.get(run.pool, []), heads.get(run.pool)
        counted[run.pool] = position = counted.get(run.pool, 0) + 1
        reason, shares = _attempt(run, lanes, nodes, clock, held, quotas or {}, head)
        if shares:
            for lane, indices in shares:
                _take(lane, indices, run, clock)
            held[run.pool, run.owner] = held.get((run.pool, run.owner), 0) + run.devices
            placements.append(Placement(run.run, tuple(Share(lane.node, tuple(indices)) for lane, indices in shares)))
            continue
        start: float | None = None
        if position <= ESTIMATED and not _held_back(run, clock, held, quotas or {}):
            start = _estimate(run, lanes, clock, heads)
        waits.append(Wait(run.run, len(waits) + 1, reason, start))
    return Decision(tuple(placements), tuple(waits))


def _attempt(
    run: Waiting, lanes: list[_Lane], nodes: Sequence[NodeView], now: float,
    held: Mapping[tuple[str, str], int], quotas: Mapping[str, int], head: _Head | None,
) -> tuple[str, list[tuple[_Lane, list[int]]]]:  # fmt: skip
    """The shares of a run that starts now, or the reason why not."""
    if run.not_before is not None and run.not_before > now:
        return back_off(run.not_before), []
    quota, has = quotas.get(run.pool), held.get((run.pool, run.owner), 0)
    if quota is not None and has + run.devices > quota:
        return over_quota(run, quota, has), []
    fitting = _fitting(run, lanes)
    if run.keep:
        away = [node for node in nodes if node.name in run.keep and not node.usable]
        if any(node.away == "silent" for node in away):
            return checkpoint_away(run, [node.name for node in away]), []
        if not away and all(any(lane.node == name for lane in fitting) for name in run.keep):
            fitting = [lane for lane in fitting if lane.node in run.keep]
    # a short run may use what is kept for the head if it is gone by then
    passing = head is not None and run.max_seconds is not None and now + run.max_seconds <= head.start
    for kind in _kinds(fitting):
        same = [lane for lane in fitting if lane.kind == kind]
        if shares := _gang(run, same, passing):
            return "", shares
    return _why(run, fitting, nodes, head, lanes), []


def _gang(run: Waiting, lanes: list[_Lane], passing: bool) -> list[tuple[_Lane, list[int]]]:
    """The fewest nodes that hold the gang with as many ranks on each; among those the fullest, to keep others whole."""
    room = {id(lane): len(lane.free) if passing else lane.open for lane in lanes}
    for count in _splits(run.devices, len(lanes)):
        per = run.devices // count
        fit = [lane for lane in lanes if room[id(lane)] >= per]
        if len(fit) >= count:
            fit.sort(key=lambda lane: (lane.node not in run.keep, room[id(lane)], lane.node))
            chosen = sorted(fit[:count], key=lambda lane: lane.node)
            return [(lane, sorted(lane.free)[:per]) for lane in chosen]
    return []


def _splits(devices: int, nodes: int) -> Iterable[int]:
    """Numbers of nodes over which so many ranks spread evenly, fewest first."""
    return (count for count in range(1, min(devices, nodes) + 1) if devices % count == 0)


def _estimate(run: Waiting, lanes: list[_Lane], now: float, heads: dict[str, _Head]) -> float | None:
    """When the run starts at the latest if all before it do; books those devices, and keeps them for a head of line."""
    best: tuple[float, int, list[_Lane]] | None = None
    fitting = _fitting(run, lanes)
    for kind in _kinds(fitting):
        same = [lane for lane in fitting if lane.kind == kind]
        for count in _splits(run.devices, len(same)):
            per = run.devices // count
            able = [
                (sorted(lane.free_at)[per - 1], -len(lane.free), lane.node, lane)
                for lane in same
                if len(lane.slots) >= per
            ]
            if len(able) < count:
                continue
            able.sort(key=lambda item: item[:3])
            chosen = [item[3] for item in able[:count]]
            start = max(now, able[count - 1][0], run.not_before or 0.0)
            if best is None or start < best[0]:
                best = (start, per, chosen)
    if best is None:
        return None
    start, per, chosen = best
    if run.pool not in heads and now - run.queued_at >= RESERVE_AFTER_S and (run.not_before or 0.0) <= now:
        heads[run.pool] = _Head(run.run, start, frozenset(id(lane) for lane in chosen))
        for lane in chosen:
            lane.kept = per
    end = start + run.max_seconds if run.max_seconds is not None else math.inf
    for lane in chosen:
        lane.free_at.sort()
        lane.free_at[:per] = [end] * per
    return start if math.isfinite(start) else None


def _take(lane: _Lane, indices: list[int], run: Waiting, now: float) -> None:
    lane.free = [index for index in lane.free if index not in indices]
    lane.taken[run.run] = len(indices)
    lane.free_at.sort()
    lane.free_at[: len(indices)] = [now + run.max_seconds if run.max_seconds is not None else math.inf] * len(indices)


def _lanes(node: NodeView, now: float) -> list[_Lane]:
    found = []
    for kind in sorted({slot.kind for slot in node.slots}):
        slots = tuple(slot for slot in node.slots if slot.kind == kind)
        free = [slot.index for slot in slots if slot.run is None]
        until = [
            now if slot.run is None else max(now, slot.until) if slot.until is not None else math.inf for slot in slots
        ]
        found.append(_Lane(node.name, kind, slots[0].gpu, slots, free, until))
    return found


def _fitting(run: Waiting, lanes: list[_Lane]) -> list[_Lane]:
    return [lane for lane in lanes if run.device is None or lane.kind == run.device]


def _kinds(lanes: list[_Lane]) -> list[str]:
    """GPUs before CPU slots, then the kind with most devices; a gang has one kind."""
    total: dict[tuple[bool, str], int] = {}
    for lane in lanes:
        total[lane.gpu, lane.kind] = total.get((lane.gpu, lane.kind), 0) + len(lane.slots)
    return [kind for (gpu, kind), _ in sorted(total.items(), key=lambda item: (not item[0][0], -item[1], item[0][1]))]


def _held(nodes: Sequence[NodeView]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for node in nodes:
        for slot in node.slots:
            if slot.run is not None:
                found[node.pool, slot.owner] = found.get((node.pool, slot.owner), 0) + 1
    return found


def _held_back(run: Waiting, now: float, held: Mapping[tuple[str, str], int], quotas: Mapping[str, int]) -> bool:
    quota = quotas.get(run.pool)
    return quota is not None and held.get((run.pool, run.owner), 0) + run.devices > quota


def _why(run: Waiting, fitting: list[_Lane], nodes: Sequence[NodeView], head: _Head | None, lanes: list[_Lane]) -> str:
    """The sentence for a run that no kind of device has room for."""
    if not fitting:
        return nowhere(run, nodes)
    kind = max(_kinds(fitting), key=lambda kind: sum(len(lane.slots) for lane in fitting if lane.kind == kind))
    same = [lane for lane in fitting if lane.kind == kind]
    total, free = sum(len(lane.slots) for lane in same), sum(len(lane.free) for lane in same)
    sizes = [len(lane.slots) for lane in same]
    if total < run.devices:
        return no_room(run, total, nodes)
    if not any(
        sum(size >= run.devices // count for size in sizes) >= count for count in _splits(run.devices, len(same))
    ):
        return unequal(run, sizes, ever=True)
    if free >= run.devices:
        open_ = sum(lane.open for lane in same)
        if head is not None and open_ < free:
            return behind(run, head.run, free)
        return unequal(run, [len(lane.free) for lane in same], ever=False)
    holders: dict[int, int] = {}
    for lane in same:
        for slot in lane.slots:
            if slot.run is not None:
                holders[slot.run] = holders.get(slot.run, 0) + 1
        for holder, count in lane.taken.items():
            holders[holder] = holders.get(holder, 0) + count
    return busy(run, free, total, holders)
