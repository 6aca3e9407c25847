"""The devices of one pass: which are free, when the others are, which are kept. Changed while a
pass places runs.

Knows nodes and numbers of devices; does not know priorities, quotas or sentences.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One healthy device.

    `run` holds it, at the latest until `until` (Unix seconds) where that is known.
    """

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


class Lane:
    """The devices of one kind on one usable node.

    `free_at`, ascending, says when each is free; inf: nobody knows.
    """

    def __init__(self, node: str, slots: Sequence[Slot], now: float) -> None:
        self.node, self.kind, self.gpu, self.size = node, slots[0].kind, slots[0].gpu, len(slots)
        self.free = sorted(slot.index for slot in slots if slot.run is None)
        held = [
            math.inf if slot.until is None else max(now, slot.until)
            for slot in slots
            if slot.run is not None
        ]
        self.free_at = sorted([now] * len(self.free) + held)
        self.kept = 0  # free devices that wait for a run at the head of its line
        self.holders: dict[int, int] = {}
        for slot in slots:
            if slot.run is not None:
                self.holders[slot.run] = self.holders.get(slot.run, 0) + 1

    def room(self, passing: bool) -> int:
        """Devices to be had now; a run that passes may use those kept as well."""
        return len(self.free) if passing else max(0, len(self.free) - self.kept)

    def book(self, devices: int, until: float) -> None:
        self.free_at = sorted([until] * devices + self.free_at[devices:])

    def take(self, run: int, devices: int, until: float) -> tuple[int, ...]:
        """The lowest free indices, which are the run's from now on."""
        taken, self.free = self.free[:devices], self.free[devices:]
        self.holders[run] = self.holders.get(run, 0) + devices
        self.book(devices, until)
        return tuple(taken)


class Room:
    """Lanes of one kind, where a gang finds a place. Sums are kept until `changed` is called."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = sorted(lanes, key=lambda lane: lane.node)
        self.total = sum(lane.size for lane in lanes)
        self._sizes = sorted(lane.size for lane in lanes)
        self._rooms: dict[bool, list[int]] = {}

    @property
    def kind(self) -> str:
        return self.lanes[0].kind

    @property
    def sizes(self) -> list[int]:
        return [lane.size for lane in self.lanes]

    @property
    def frees(self) -> list[int]:
        return [lane.room(passing=True) for lane in self.lanes]

    def only(self, nodes: Collection[str]) -> Room:
        """The part of it on these nodes, for one question."""
        return Room([lane for lane in self.lanes if lane.node in nodes])

    def changed(self) -> None:
        self._rooms.clear()

    def open(self, *, passing: bool) -> int:
        return sum(self._sorted(passing))

    def ever_even(self, devices: int) -> bool:
        """Whether so many ranks could be spread evenly if everything were free."""
        return any(
            _enough(self._sizes, devices // count, count)
            for count in splits(devices, len(self.lanes))
        )

    def gang(self, devices: int, prefer: Collection[str], *, passing: bool) -> list[Lane]:
        """The fewest lanes that hold the gang evenly; among those the fullest, to keep others
        whole. Empty: none do.
        """
        rooms = self._sorted(passing)
        for count in splits(devices, len(self.lanes)):
            per = devices // count
            if _enough(rooms, per, count):
                fit = [lane for lane in self.lanes if lane.room(passing) >= per]
                fit.sort(key=lambda lane: (lane.node not in prefer, lane.room(passing), lane.node))
                return sorted(fit[:count], key=lambda lane: lane.node)
        return []

    def earliest(self, devices: int) -> tuple[float, list[Lane]] | None:
        """When and where the gang fits at the latest; inf where nobody knows, None where never."""
        best: tuple[float, list[Lane]] | None = None
        for count in splits(devices, len(self.lanes)):
            per = devices // count
            if not _enough(self._sizes, per, count):
                continue
            able = [
                (lane.free_at[per - 1], -len(lane.free), lane.node, lane)
                for lane in self.lanes
                if lane.size >= per
            ]
            able.sort(key=lambda item: item[:3])
            if best is None or able[count - 1][0] < best[0]:
                best = (able[count - 1][0], [item[3] for item in able[:count]])
        return best

    def _sorted(self, passing: bool) -> list[int]:
        if passing not in self._rooms:
            self._rooms[passing] = sorted(lane.room(passing) for lane in self.lanes)
        return self._rooms[passing]


def splits(devices: int, nodes: int) -> Iterator[int]:
    """Numbers of nodes over which so many ranks spread evenly, fewest first."""
    return (count for count in range(1, min(devices, nodes) + 1) if devices % count == 0)


def rooms_by_pool(nodes: Sequence[NodeView], now: float) -> dict[str, list[Room]]:
    """The rooms of each pool: GPUs before CPU slots, then the kind with most devices."""
    lanes: dict[str, dict[str, list[Lane]]] = {node.pool: {} for node in nodes}
    for node in nodes:
        if node.usable:
            for kind in {slot.kind for slot in node.slots}:
                lane = Lane(node.name, [slot for slot in node.slots if slot.kind == kind], now)
                lanes[node.pool].setdefault(kind, []).append(lane)
    found = {pool: [Room(some) for some in kinds.values()] for pool, kinds in lanes.items()}
    for rooms in found.values():
        rooms.sort(key=lambda room: (not room.lanes[0].gpu, -room.total, room.kind))
    return found


def _enough(ascending: list[int], least: int, count: int) -> bool:
    return len(ascending) - bisect_left(ascending, least) >= count
