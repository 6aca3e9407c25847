"""A picture of a run's lineage: boxes in columns by level, and curves between them. Pure functions.

Positions are in the drawing's own units, one per CSS pixel at its natural size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.runs.outputs.lineage import Edge, Lineage, Node

WIDTH: Final = 200.0
HEIGHT: Final = 56.0
_GAP_X: Final = 152.0
_GAP_Y: Final = 24.0
_LONGEST: Final = 26  # characters of a label


@dataclass(frozen=True, slots=True)
class Box:
    """A node and its upper left corner."""

    node: Node
    x: float
    y: float
    label: str
    own: bool


@dataclass(frozen=True, slots=True)
class Arrow:
    """An edge as an SVG path, with the place of its text."""

    path: str
    x: float
    y: float
    edge: Edge


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes and arrows of a drawing of the given size."""

    boxes: list[Box]
    arrows: list[Arrow]
    width: float
    height: float


def picture(graph: Lineage) -> Picture:
    """Place a graph's nodes: what is used stands to the left of what uses it."""
    columns = _columns(graph)
    placed: dict[str, Box] = {}
    tallest = max(len(column) for column in columns)
    height = tallest * (HEIGHT + _GAP_Y) - _GAP_Y
    for number, column in enumerate(columns):
        # nodes close to what they are connected with: fewer crossings
        column.sort(key=lambda node: (_mean_y(node, graph.edges, placed), node.level, node.id))
        used = len(column) * (HEIGHT + _GAP_Y) - _GAP_Y
        top = (height - used) / 2
        for place, node in enumerate(column):
            x, y = number * (WIDTH + _GAP_X), top + place * (HEIGHT + _GAP_Y)
            placed[node.id] = Box(node, x, y, _shortened(node.label), node.level == 0)
    arrows = _arrows(graph.edges, placed)
    width = len(columns) * (WIDTH + _GAP_X) - _GAP_X
    return Picture(list(placed.values()), arrows, width, height)


def _columns(graph: Lineage) -> list[list[Node]]:
    """Nodes by column: one to the right of the last of the nodes they use."""
    sources: dict[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        sources[edge.target].append(edge.source)
    column: dict[str, int] = {}

    def place(id: str, path: frozenset[str]) -> int:
        if id not in column:
            before = [place(each, path | {id}) for each in sources[id] if each not in path]
            column[id] = 1 + max(before, default=-1)
        return column[id]

    for id in graph.nodes:
        place(id, frozenset({id}))
    for edge in graph.edges:  # next to what uses them
        if not sources[edge.source]:
            targets = [column[each.target] for each in graph.edges if each.source == edge.source]
            column[edge.source] = max(0, min(targets) - 1)
    columns: dict[int, list[Node]] = defaultdict(list)
    for id, node in graph.nodes.items():
        columns[column[id]].append(node)
    return [columns[number] for number in sorted(columns)]


def _mean_y(node: Node, edges: Sequence[Edge], placed: dict[str, Box]) -> float:
    near = [placed[e.source].y for e in edges if e.target == node.id and e.source in placed]
    return sum(near) / len(near) if near else 0.0


def _arrows(edges: Sequence[Edge], placed: dict[str, Box]) -> list[Arrow]:
    """Curves whose ends share the height of a box, in the order of their sources."""
    arriving: dict[str, list[Edge]] = defaultdict(list)
    for edge in sorted(edges, key=lambda each: (placed[each.source].y, each.source)):
        arriving[edge.target].append(edge)
    arrows = []
    for target, own in arriving.items():
        box = placed[target]
        for number, edge in enumerate(own):
            y = box.y + HEIGHT * (number + 1) / (len(own) + 1)
            arrows.append(_arrow(edge, placed[edge.source], box.x - 6, y))
    return arrows


def _arrow(edge: Edge, source: Box, to_x: float, to_y: float) -> Arrow:
    x, y = source.x + WIDTH, source.y + HEIGHT / 2
    bend = max(24.0, (to_x - x) / 2)
    path = f"M{x:g},{y:g} C{x + bend:g},{y:g} {to_x - bend:g},{to_y:g} {to_x:g},{to_y:g}"
    # next to the target: several edges leave one source
    return Arrow(path, to_x - 10, to_y - 5, edge)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def table(graph: Lineage) -> list[dict[str, Any]]:
    """The edges as rows, for readers that do not see the picture."""
    return [
        {"source": graph.nodes[edge.source], "target": graph.nodes[edge.target], "edge": edge}
        for edge in graph.edges
    ]
