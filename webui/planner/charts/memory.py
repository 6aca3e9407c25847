"""What holds a device's memory: a stacked bar, and a treemap laid out as squares as may be. Pure.

The treemap follows Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000). Areas are shares of
the capacity, or of
the whole where it is larger than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting

# category → (word, colour of tokens.css); the order is the same everywhere
CATEGORIES: Final = (
    ("params_bytes", "parameters", "mem-params"),
    ("grads_bytes", "gradients", "mem-grads"),
    ("optimizer_bytes", "optimizer", "mem-optimizer"),
    ("activations_bytes", "activations", "mem-activations"),
    ("logits_bytes", "logits", "mem-logits"),
    ("kv_cache_bytes", "KV cache", "mem-kv_cache"),
    ("buffers_bytes", "buffers", "mem-buffers"),
    ("unattributed_bytes", "unattributed", "mem-other"),
)
_ASPECT: Final = 1.9  # width over height of the place the treemap is drawn in


@dataclass(frozen=True, slots=True)
class Piece:
    """One category; `share` of the bar in per cent, the box in per cent of the place."""

    name: str
    word: str
    hue: str
    bytes: float
    says: str
    share: float
    of_total: str
    left: float = 0.0
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0

    @property
    def room(self) -> str:
        """How much text the box can hold: all, name or none."""
        wide = 4 + 1.55 * max(len(self.word), 8)  # per cent of a place some 480 px wide
        if self.width < wide or self.height < 10:
            return "none"
        return "all" if self.height >= 17 else "name"


def pieces(memory: Mapping[str, Any], *, with_free: bool = True) -> list[Piece]:
    """The categories that hold something, in their steady order, free memory last."""
    held = [
        (name, word, hue, formatting.number(memory.get(name)) or 0.0)
        for name, word, hue in CATEGORIES
    ]
    total = sum(value for *_, value in held)
    capacity = formatting.number(memory.get("capacity_bytes")) or 0.0
    free = max(0.0, capacity - (formatting.number(memory.get("total_bytes")) or total))
    whole = max(capacity, total) or 1.0
    found = [
        _piece(name, word, hue, value, whole, total) for name, word, hue, value in held if value > 0
    ]
    if with_free and free > 0:
        found.append(_piece("free", "free", "mem-free", free, whole, total + free))
    return found


def _piece(name: str, word: str, hue: str, value: float, whole: float, total: float) -> Piece:
    return Piece(
        name,
        word,
        hue,
        value,
        formatting.memory(value),
        round(100 * value / whole, 3),
        formatting.percent(value / total),
    )


def treemap(memory: Mapping[str, Any], *, with_free: bool = True) -> list[Piece]:
    """The pieces with their boxes, in the steady order."""
    found = pieces(memory, with_free=with_free)
    boxes = squarified([piece.bytes for piece in found], 100 * _ASPECT, 100.0)
    return [
        Piece(
            piece.name,
            piece.word,
            piece.hue,
            piece.bytes,
            piece.says,
            piece.share,
            piece.of_total,
            round(left / _ASPECT, 3),
            round(top, 3),
            round(width / _ASPECT, 3),
            round(height, 3),
        )
        for piece, (left, top, width, height) in zip(found, boxes, strict=True)
    ]


def squarified(
    values: Sequence[float], width: float, height: float
) -> list[tuple[float, float, float, float]]:
    """`(left, top, width, height)` of each value, its area in proportion; the order of the values
    is kept.
    """
    order = sorted(range(len(values)), key=lambda index: -values[index])
    scale = width * height / (sum(values) or 1.0)
    areas = [values[index] * scale for index in order]
    boxes: list[tuple[float, float, float, float]] = []
    left = top = 0.0
    start = 0
    while start < len(areas):
        short = min(width, height) or 1.0
        stop = start + 1
        while stop < len(areas) and _worst(areas[start : stop + 1], short) <= _worst(
            areas[start:stop], short
        ):
            stop += 1
        row = areas[start:stop]
        thick = sum(row) / short
        along = 0.0
        for area in row:
            length = area / thick if thick else 0.0
            if width >= height:
                boxes.append((left, top + along, thick, length))
            else:
                boxes.append((left + along, top, length, thick))
            along += length
        if width >= height:
            left, width = left + thick, width - thick
        else:
            top, height = top + thick, height - thick
        start = stop
    placed = [(0.0, 0.0, 0.0, 0.0)] * len(values)
    for index, box in zip(order, boxes, strict=True):
        placed[index] = box
    return placed


def _worst(areas: Sequence[float], short: float) -> float:
    """The largest ratio of sides in a row of these areas along a side of that length."""
    total = sum(areas)
    if total <= 0 or min(areas) <= 0:
        return float("inf")
    return max(short**2 * max(areas) / total**2, total**2 / (short**2 * min(areas)))


def summary(memory: Mapping[str, Any]) -> str:
    """The same in a sentence."""
    found = [piece for piece in pieces(memory, with_free=False)]
    total, capacity = memory.get("total_bytes"), memory.get("capacity_bytes")
    parts = formatting.listed(
        [f"{piece.word} {piece.says}" for piece in sorted(found, key=lambda piece: -piece.bytes)]
    )
    stage = memory.get("stage")
    where = (
        f" on stage {stage}"
        if isinstance(stage, int) and len(memory.get("per_stage_total_bytes") or []) > 1
        else ""
    )
    return f"{formatting.memory(total)} of {formatting.memory(capacity)}{where}: {parts}."


def stages(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per pipeline stage its bar against the capacity; empty for one stage."""
    totals = [
        formatting.number(value) or 0.0 for value in memory.get("per_stage_total_bytes") or []
    ]
    capacity = formatting.number(memory.get("capacity_bytes")) or 0.0
    if len(totals) < 2:
        return []
    full = max([capacity, *totals]) or 1.0
    return [
        {
            "stage": stage,
            "share": round(100 * total / full, 2),
            "says": formatting.memory(total),
            "over": bool(capacity and total > capacity),
            "worst": stage == memory.get("stage"),
        }
        for stage, total in enumerate(totals)
    ]
