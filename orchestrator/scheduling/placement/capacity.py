"""Devices of one scheduling pass: which are free, reserved, or held and until when.

A pass changes them while it places runs. Does not depend on priorities, quotas or wait reasons.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.scheduling.placement import topology


@dataclass(frozen=True)
class Slot:
    """One healthy device; `run` holds it, at most until `until` (Unix seconds, if known).

    `early` is the earliest end that its measured progress allows; None if it may end at any time.
    """

    index: int
    kind: str  # its catalogue name, or its product's
    gpu: bool = False
    run: int | None = None
    owner: str = ""
    until: float | None = None
    early: float | None = None
    team: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """A time (Unix seconds) in which a node takes only the team's runs; without team none."""

    start: float
    end: float
    team: str = ""
    whole_pool: bool = False  # also of nodes that the pool gets later

    def excludes(self, team: str, start: float, lasts_s: float) -> bool:
        """Whether a run of the team, from `start` on, may last into the window."""
        return (
            self.end > start
            and self.start < start + lasts_s
            and (not self.team or self.team != team)
        )


@dataclass(frozen=True)
class NodeView:
    """One node.

    `unusable_reason` of a node that is not usable: "drained", "cordoned", "incompatible",
    "silent" or "lost".
    """

    name: str
    pool: str
    slots: tuple[Slot, ...]
    usable: bool = True  # up and not drained
    unusable_reason: str = ""
    supports: frozenset[str] = frozenset()  # images, limits, limits of images
    windows: tuple[Window, ...] = ()
    place: tuple[str, ...] = ()  # path in the tree of switches


# node, time from which it has free devices → time from which it may be used
Delay = Callable[[str, float], float]


class NodeDevices:
    """Devices of one kind on one usable node.

    `free_at`, ascending, is when each becomes free at the latest, inf if unknown; `early` when
    each may be free at the earliest.
    """

    def __init__(
        self, node: str, slots: Sequence[Slot], now: float, place: topology.Place = ()
    ) -> None:
        self.place = place
        self.node, self.kind, self.gpu, self.size = node, slots[0].kind, slots[0].gpu, len(slots)
        self.free = sorted(slot.index for slot in slots if slot.run is None)
        held = [
            math.inf if slot.until is None else max(now, slot.until)
            for slot in slots
            if slot.run is not None
        ]
        self.free_at = sorted([now] * len(self.free) + held)
        self.early = sorted(
            now
            if slot.run is None or slot.early is None
            else max(now, min(slot.early, math.inf if slot.until is None else slot.until))
            for slot in slots
        )
        self.reserved = 0  # free devices reserved for a pool's first run
        self.holders: dict[int, int] = {}
        for slot in slots:
            if slot.run is not None:
                self.holders[slot.run] = self.holders.get(slot.run, 0) + 1

    def available(self, backfill: bool) -> int:
        """Devices available now; a backfilled run may also use reserved ones."""
        return len(self.free) if backfill else max(0, len(self.free) - self.reserved)

    def book(self, devices: int, until: float) -> None:
        """Assume that the devices that become free first are held until `until`."""
        self.free_at = sorted([until] * devices + self.free_at[devices:])

    def take(
        self, run: int, devices: int, until: float, early: float = -math.inf
    ) -> tuple[int, ...]:
        """Give the run the lowest free indices; it ends between `early` and `until`."""
        taken, self.free = self.free[:devices], self.free[devices:]
        self.holders[run] = self.holders.get(run, 0) + devices
        self.book(devices, until)
        self.early = sorted([early] * devices + self.early[devices:])
        return tuple(taken)

    def give_back(self, run: int, devices: Sequence[int], until: float, early: float) -> None:
        """Free what the run took with these limits."""
        self.free = sorted([*self.free, *devices])
        del self.holders[run]
        for _ in devices:
            try:
                self.free_at.remove(until)
            except ValueError:  # booked for the estimate of a later run
                self.free_at.pop()
            self.early.remove(early)
        self.free_at[:0] = self.early[:0] = [-math.inf] * len(devices)


class DeviceGroup:
    """Devices of one kind in a pool; a gang is placed within one group.

    Keeps its nodes by available devices; call `changed` for nodes whose devices changed.
    """

    def __init__(self, nodes: Sequence[NodeDevices]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.node)
        self.total = sum(node.size for node in nodes)
        self._sizes = sorted(node.size for node in nodes)
        self._has_places = any(node.place for node in nodes)
        self._levels: dict[bool, _Levels] = {}

    @property
    def kind(self) -> str:
        """The devices' kind."""
        return self.nodes[0].kind

    @property
    def sizes(self) -> list[int]:
        """Devices per node."""
        return [node.size for node in self.nodes]

    @property
    def free_counts(self) -> list[int]:
        """Free devices per node, including reserved ones."""
        return [node.available(backfill=True) for node in self.nodes]

    def on_nodes(self, names: Collection[str]) -> DeviceGroup:
        """A group of only these nodes."""
        return DeviceGroup([node for node in self.nodes if node.node in names])

    def without(self, names: Collection[str]) -> DeviceGroup:
        """A group of all but these nodes."""
        return DeviceGroup([node for node in self.nodes if node.node not in names])

    def changed(self, nodes: Sequence[NodeDevices]) -> None:
        """Count these nodes again after a placement or reservation; ignores other groups' nodes."""
        for levels in self._levels.values():
            for node in nodes:
                levels.move(node)

    def available(self, *, backfill: bool) -> int:
        """Devices available now on all nodes."""
        return sum(level * len(names) for level, names in self._by_level(backfill).names.items())

    def can_ever_fit(self, devices: int, together: int = 1) -> bool:
        """Whether the gang would fit evenly if all devices were free."""
        return any(
            _enough(self._sizes, devices // count, count)
            for count in self._counts(devices, together)
        )

    def fit(
        self,
        devices: int,
        prefer: Collection[str],
        *,
        backfill: bool,
        together: int = 1,
        stages: int = 1,
        pipeline_close: bool = False,
    ) -> list[NodeDevices]:
        """The fewest nodes that fit the gang evenly, preferring the fullest; empty if none do.

        In a tree of switches the closest ones, in the order of their ranks (`topology`).
        """
        levels = self._by_level(backfill)
        for count in self._counts(devices, together):
            if self._has_places and count > 1 and not prefer:
                unit = topology.unit_of(count, stages, pipeline_close)
                close = topology.closest(levels.at_least(devices // count), count, unit)
                if close:
                    return topology.in_rank_order(close, stages, pipeline_close)
                continue
            if nodes := levels.fullest(devices // count, count, prefer):
                return sorted(nodes, key=lambda node: node.node)
        return []

    def earliest(
        self, devices: int, together: int = 1, delay: Delay | None = None
    ) -> tuple[float, list[NodeDevices]] | None:
        """The latest time at which the gang fits, and where; inf if unknown, None if never.

        With `delay` a node counts from when it may be used, not from when devices are free.
        """
        best: tuple[float, list[NodeDevices]] | None = None
        for count in self._counts(devices, together):
            per_node = devices // count
            if not _enough(self._sizes, per_node, count):
                continue
            fitting = [
                (
                    delay(node.node, node.free_at[per_node - 1])
                    if delay
                    else node.free_at[per_node - 1],
                    -len(node.free),
                    node.node,
                    node,
                )
                for node in self.nodes
                if node.size >= per_node
            ]
            fitting.sort(key=lambda item: item[:3])
            if best is None or fitting[count - 1][0] < best[0]:
                best = (fitting[count - 1][0], [item[3] for item in fitting[:count]])
        return best

    def may_start(self, devices: int, together: int = 1) -> float:
        """The earliest time at which the gang may fit if holders end early; inf if never."""
        times = [math.inf]
        for count in self._counts(devices, together):
            per_node = devices // count
            ends = sorted(node.early[per_node - 1] for node in self.nodes if node.size >= per_node)
            times += ends[count - 1 : count]
        return min(times)

    def _counts(self, devices: int, together: int) -> Iterator[int]:
        """`node_counts`; a tensor-parallel group larger than every node may span nodes."""
        whole = together if self._sizes and self._sizes[-1] >= together else 1
        return node_counts(devices, len(self.nodes), whole)

    def _by_level(self, backfill: bool) -> _Levels:
        if backfill not in self._levels:
            self._levels[backfill] = _Levels(self.nodes, backfill)
        return self._levels[backfill]


class _Levels:
    """The names of a group's nodes, sorted, by their number of available devices."""

    def __init__(self, nodes: Sequence[NodeDevices], backfill: bool) -> None:
        self.names: dict[int, list[str]] = {}
        self._backfill = backfill
        self._nodes = {node.node: node for node in nodes}
        self._level = {node.node: node.available(backfill) for node in nodes}
        for name in sorted(self._nodes):
            self.names.setdefault(self._level[name], []).append(name)

    def move(self, node: NodeDevices) -> None:
        """Move a node to its level, if it is one of the group's."""
        name, level = node.node, node.available(self._backfill)
        if self._nodes.get(name) is not node or level == self._level[name]:
            return
        names = self.names[self._level[name]]
        names.pop(bisect_left(names, name))
        insort(self.names.setdefault(level, []), name)
        self._level[name] = level

    def at_least(self, least: int) -> list[NodeDevices]:
        """The nodes with at least `least` devices, the fullest first."""
        levels = sorted(level for level in self.names if level >= least)
        return [self._nodes[name] for level in levels for name in self.names[level]]

    def fullest(self, least: int, count: int, prefer: Collection[str]) -> list[NodeDevices]:
        """`count` nodes with at least `least` devices, preferred ones first, then the fullest."""
        levels = sorted(level for level in self.names if level >= least)
        if sum(len(self.names[level]) for level in levels) < count:
            return []
        names = [name for name in sorted(prefer) if self._level.get(name, -1) >= least]
        names.sort(key=lambda name: self._level[name])
        for level in levels:
            if len(names) >= count:
                break
            more = self.names[level][: count + len(prefer)]
            names += [name for name in more if name not in prefer]
        return [self._nodes[name] for name in names[:count]]


def node_counts(devices: int, nodes: int, together: int = 1) -> Iterator[int]:
    """Numbers of nodes that divide the gang evenly, fewest first.

    Each node gets a multiple of `together` devices; a gang that this does not divide ignores it.
    """
    parts = devices // together if devices % together == 0 else devices
    return (count for count in range(1, min(parts, nodes) + 1) if parts % count == 0)


def could_fit(nodes: Sequence[NodeView], devices: int, kind: str | None) -> bool:
    """Whether these nodes fit the gang if they are usable and all their devices are free."""
    for each in {slot.kind for node in nodes for slot in node.slots if kind in (None, slot.kind)}:
        sizes = sorted(sum(slot.kind == each for slot in node.slots) for node in nodes)
        counts = node_counts(devices, len(nodes))
        if any(_enough(sizes, devices // count, count) for count in counts):
            return True
    return False


def groups_by_pool(nodes: Sequence[NodeView], now: float) -> dict[str, list[DeviceGroup]]:
    """The groups of each pool: GPUs before CPU slots, then the kind with most devices."""
    by_kind: dict[str, dict[str, list[NodeDevices]]] = {node.pool: {} for node in nodes}
    for node in nodes:
        if node.usable:
            for kind in {slot.kind for slot in node.slots}:
                slots = [slot for slot in node.slots if slot.kind == kind]
                devices = NodeDevices(node.name, slots, now, node.place)
                by_kind[node.pool].setdefault(kind, []).append(devices)
    pools = {
        pool: [DeviceGroup(devices) for devices in kinds.values()]
        for pool, kinds in by_kind.items()
    }
    for groups in pools.values():
        groups.sort(key=lambda group: (not group.nodes[0].gpu, -group.total, group.kind))
    return pools


def _enough(ascending: list[int], least: int, count: int) -> bool:
    return len(ascending) - bisect_left(ascending, least) >= count
