"""Chooses the nodes of a gang that are close in the network, and the order of their ranks. Pure.

A node's place is its path in the tree of switches, such as `row-1/rack-3`; nodes without a place
are each their own branch. Like Slurm's topology/tree plugin and Kueue's BestFit: the lowest subtree
that fits, of these the one with the least free nodes, within it as few branches as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Place = tuple[str, ...]


class Located(Protocol):
    """A node with its place."""

    @property
    def node(self) -> str:
        """Its name."""

    @property
    def place(self) -> Place:
        """Its path in the tree."""


T = TypeVar("T", bound=Located)


def parse(text: str) -> Place:
    """The place that a path names: `row-1/rack-3`; empty parts are left out."""
    return tuple(part for each in text.split("/") if (part := each.strip()))


@dataclass(frozen=True, slots=True)
class _Unit(Generic[T]):
    """Nodes of one branch that are taken together."""

    nodes: list[T]
    place: Place
    node: str


def closest(nodes: Sequence[T], count: int, unit: int = 1) -> list[T]:
    """`count` of the nodes in the order of the tree; empty if there are fewer.

    `nodes` come in the order of preference within a branch. If possible, each `unit` nodes that
    communicate most are of one lowest branch.
    """
    if len(nodes) < count:
        return []
    chosen: list[T] = []
    if unit > 1 and count % unit == 0:
        units = _units(nodes, unit)
        if len(units) >= count // unit:
            chosen = [node for each in _choose(units, count // unit, 0) for node in each.nodes]
    return sorted(chosen or _choose(nodes, count, 0), key=lambda node: (node.place, node.node))


def _units(nodes: Sequence[T], unit: int) -> list[_Unit[T]]:
    parts: dict[Place, list[T]] = {}
    for node in nodes:
        parts.setdefault(node.place, []).append(node)
    return [
        _Unit(part[start : start + unit], place, part[start].node)
        for place, part in parts.items()
        if place
        for start in range(0, len(part) - unit + 1, unit)
    ]


def _choose(nodes: Sequence[T], count: int, depth: int) -> list[T]:
    """`count` nodes of the lowest subtree that has them, from as few branches as possible."""
    level, _, _, subtree = _lowest(nodes, count, depth)
    branches = _branches(subtree, -level)
    if branches is None:
        return list(subtree[:count])
    chosen: list[T] = []
    rest = dict(branches)
    while len(chosen) < count:  # the largest branches, the last one as small as possible
        left = count - len(chosen)
        enough = [(len(part), name) for name, part in rest.items() if len(part) >= left]
        largest = max(rest.items(), key=lambda item: (len(item[1]), item[0]))[0]
        part = rest.pop(min(enough)[1] if enough else largest)
        chosen += _choose(part, min(left, len(part)), 1 - level)
    return chosen


def _lowest(nodes: Sequence[T], count: int, depth: int) -> tuple[int, int, str, Sequence[T]]:
    """`(-depth, size, first name, nodes)` of the lowest and then smallest subtree that fits."""
    branches = _branches(nodes, depth) or {}
    fitting = [part for part in branches.values() if len(part) >= count]
    if not fitting:
        return -depth, len(nodes), min((node.node for node in nodes), default=""), nodes
    return min((_lowest(part, count, depth + 1) for part in fitting), key=lambda item: item[:3])


def _branches(nodes: Sequence[T], depth: int) -> Mapping[Place, list[T]] | None:
    """The nodes by the branch at this depth; None if none of them has one."""
    if all(len(node.place) <= depth for node in nodes):
        return None
    parts: dict[Place, list[T]] = {}
    for node in nodes:
        own = node.place[: depth + 1] if len(node.place) > depth else ("", node.node)
        parts.setdefault(own, []).append(node)
    return parts


def unit_of(count: int, stages: int, pipeline_close: bool) -> int:
    """Nodes that communicate most: those of a stage, or one of each stage; 1 if it does not divide.

    `count` nodes of a gang with this number of pipeline stages.
    """
    if stages < 1 or count % stages:
        return 1
    return stages if pipeline_close else count // stages


def in_rank_order(nodes: Sequence[T], stages: int, pipeline_close: bool) -> list[T]:
    """The order in which nodes get ranks; ranks of a stage follow each other.

    Neighbours in the tree stay in one stage, or, if the pipeline is to be close, get the same place
    in different stages.
    """
    if not pipeline_close or stages < 2 or len(nodes) % stages:
        return list(nodes)
    return [node for stage in range(stages) for node in nodes[stage::stages]]
