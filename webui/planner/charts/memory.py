"""A device's memory by category: stacked bar and squarified treemap.

The treemap follows Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000). Areas are shares of
the capacity, or of the total if that is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.presentation import formatting

# category → (label, color of tokens.css); all charts use this order
CATEGORIES: Final = (
    ("params_bytes", gettext_noop("parameters"), "mem-params"),
    ("reference_bytes", gettext_noop("reference"), "mem-reference"),
    ("grads_bytes", gettext_noop("gradients"), "mem-grads"),
    ("optimizer_bytes", gettext_noop("optimizer"), "mem-optimizer"),
    ("activations_bytes", gettext_noop("activations"), "mem-activations"),
    ("logits_bytes", gettext_noop("logits"), "mem-logits"),
    ("kv_cache_bytes", gettext_noop("KV cache"), "mem-kv_cache"),
    ("buffers_bytes", gettext_noop("buffers"), "mem-buffers"),
    ("rollout_bytes", gettext_noop("rollouts"), "mem-rollouts"),
    ("unattributed_bytes", gettext_noop("unattributed"), "mem-other"),
)
_ASPECT: Final = 1.9  # width over height of the treemap


@dataclass(frozen=True, slots=True)
class Segment:
    """One category; `share` and the box are in percent of the bar and of the treemap."""

    name: str
    label: str
    hue: str
    bytes: float
    size: str
    share: float
    of_total: str
    left: float = 0.0
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0

    @property
    def label_space(self) -> str:
        """How much text fits into the box: all, name or none."""
        wide = 4 + 1.55 * max(len(self.label), 8)  # percent of a box about 480 px wide
        if self.width < wide or self.height < 10:
            return "none"
        return "all" if self.height >= 17 else "name"


def segments(memory: Mapping[str, Any], *, with_free: bool = True) -> list[Segment]:
    """Returns the non-empty categories in fixed order, free memory last."""
    sizes = [
        (name, label, hue, formatting.number(memory.get(name)) or 0.0)
        for name, label, hue in CATEGORIES
    ]
    total = sum(value for *_, value in sizes)
    capacity = formatting.number(memory.get("capacity_bytes")) or 0.0
    free = max(0.0, capacity - (formatting.number(memory.get("total_bytes")) or total))
    full = max(capacity, total) or 1.0
    used = [
        _segment(name, label, hue, value, full, total)
        for name, label, hue, value in sizes
        if value > 0
    ]
    if with_free and free > 0:
        used.append(_segment("free", gettext_noop("free"), "mem-free", free, full, total + free))
    return used


def _segment(name: str, label: str, hue: str, value: float, full: float, total: float) -> Segment:
    return Segment(
        name,
        _(label),
        hue,
        value,
        formatting.memory(value),
        round(100 * value / full, 3),
        formatting.percent(value / total),
    )


def treemap(memory: Mapping[str, Any], *, with_free: bool = True) -> list[Segment]:
    """Returns the segments with their boxes, in fixed order."""
    items = segments(memory, with_free=with_free)
    boxes = squarify([segment.bytes for segment in items], 100 * _ASPECT, 100.0)
    return [
        Segment(
            segment.name,
            segment.label,
            segment.hue,
            segment.bytes,
            segment.size,
            segment.share,
            segment.of_total,
            round(left / _ASPECT, 3),
            round(top, 3),
            round(width / _ASPECT, 3),
            round(height, 3),
        )
        for segment, (left, top, width, height) in zip(items, boxes, strict=True)
    ]


def squarify(
    values: Sequence[float], width: float, height: float
) -> list[tuple[float, float, float, float]]:
    """Returns `(left, top, width, height)` per value, in the order of the values.

    Areas are proportional to the values.
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
    map_problems = [(0.0, 0.0, 0.0, 0.0)] * len(values)
    for index, box in zip(order, boxes, strict=True):
        map_problems[index] = box
    return map_problems


def _worst(areas: Sequence[float], short: float) -> float:
    """Returns the largest aspect ratio in a row of these areas along a side of length `short`."""
    total = sum(areas)
    if total <= 0 or min(areas) <= 0:
        return float("inf")
    return max(short**2 * max(areas) / total**2, total**2 / (short**2 * min(areas)))


def summary(memory: Mapping[str, Any]) -> str:
    """Returns the memory by category as one sentence."""
    used = sorted(segments(memory, with_free=False), key=lambda segment: -segment.bytes)
    total, capacity = memory.get("total_bytes"), memory.get("capacity_bytes")
    parts = formatting.listed([f"{segment.label} {segment.size}" for segment in used])
    stage = memory.get("stage")
    values = {
        "used": formatting.memory(total),
        "capacity": formatting.memory(capacity),
        "stage": stage,
        "parts": parts,
    }
    if isinstance(stage, int) and len(memory.get("per_stage_total_bytes") or []) > 1:
        return _("%(used)s of %(capacity)s on stage %(stage)s: %(parts)s.") % values
    return _("%(used)s of %(capacity)s: %(parts)s.") % values


def two_peaks(memory: Mapping[str, Any]) -> str:
    """Returns both peaks with their definitions; empty without the reserved one."""
    total, reserved = memory.get("total_bytes"), memory.get("reserved_bytes")
    if not total or not reserved:
        return ""
    return _(
        "Peak allocated %(allocated)s: live tensors. Peak reserved %(reserved)s: what the "
        "allocator holds for them, with the gaps between; nvidia-smi shows it plus the device "
        "context."
    ) % {"allocated": formatting.memory(total), "reserved": formatting.memory(reserved)}


def stages(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one bar per pipeline stage, relative to the capacity; empty for one stage."""
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
            "size": formatting.memory(total),
            "over": bool(capacity and total > capacity),
            "worst": stage == memory.get("stage"),
        }
        for stage, total in enumerate(totals)
    ]
