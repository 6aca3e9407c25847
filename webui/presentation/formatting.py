"""Formats numbers, ages and plans for display. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import gettext as _

DASH = "–"


def number(value: Any) -> float | None:
    """Return a finite number as float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def quantity(value: Any, digits: int = 3) -> str:
    """Format a count or rate with a metric suffix and `digits` digits: 1234567 → 1.23M."""
    real = number(value)
    if real is None:
        return DASH
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(real) >= size:
            scale = 1e3 if suffix == "k" else size
            return _significant(real / scale, digits) + suffix
    return _significant(real, max(digits, len(str(int(abs(real))))))


def memory(value: Any) -> str:
    """Format bytes in a binary unit: 1.50 GiB."""
    real = number(value)
    if real is None:
        return DASH
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(real) >= 1024**power:
            return f"{_significant(real / 1024**power, 3)} {unit}"
    return f"{real:.0f} B"


def percent(value: Any) -> str:
    """Format a fraction as percent: 0.4312 → 43.1%."""
    real = number(value)
    return DASH if real is None else f"{_significant(100 * real, 3)}%"


def duration(value: Any) -> str:
    """Format seconds in their two largest units: 7500 → 2 h 05 min."""
    real = number(value)
    if real is None or real < 0:
        return DASH
    if real < 1:
        return f"{real * 1000:.0f} ms"
    if real < 60:
        return f"{real:.1f} s" if real < 10 else f"{real:.0f} s"
    minutes, seconds = divmod(round(real), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if seconds else f"{minutes} min"


def estimate(value: Any) -> str:
    """Format a predicted duration with the precision that it has: about 35 min, about 2.5 h."""
    text = remaining(value)
    return DASH if text == DASH else _("about %(time)s") % {"time": text}


def remaining(value: Any) -> str:
    """Format a predicted duration like `estimate`, for a field that is labeled: 35 min, 2.5 h."""
    real = number(value)
    if real is None or real < 0:
        return DASH
    if real < 55:
        return f"{max(5, 5 * round(real / 5))} s"
    for most, size, step, unit in (
        (570, 60, 1, "min"),
        (5400, 60, 5, "min"),
        (36_000, 3600, 0.5, "h"),
        (172_800, 3600, 1, "h"),
        (math.inf, 86_400, 0.5, "d"),
    ):
        if real < most:
            amount = max(step, step * round(real / size / step))
            return f"{amount:g} {unit}"
    return DASH


def seconds(value: Any, digits: int = 3) -> str:
    """Format a predicted or compared time: three digits up to a minute, then like `duration`.

    With more `digits`, times up to 1000 s stay in seconds, so close values differ.
    """
    real = number(value)
    if real is None:
        return DASH
    for most, size, unit in (
        (1e-3, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (60.0 if digits <= 3 else 1e3, 1.0, "s"),
    ):
        if 0 < real < most:
            return f"{_significant(real * size, digits)} {unit}"
    return "0 s" if real == 0 else duration(real)


def age(seconds: float) -> str:
    """Format an age in one unit: 42 s ago, 3 min ago, 5 h ago, 2 d ago."""
    rounded = max(0, round(seconds))
    if rounded < 3:
        return _("now")
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if rounded >= size:
            return _("%(age)s ago") % {"age": f"{rounded // size} {unit}"}
    return _("%(age)s ago") % {"age": f"{rounded} s"}


def count(value: int, noun: str, plural: str = "") -> str:
    """Return "1 run" or "2 runs"."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def listed(parts: Sequence[str]) -> str:
    """Join as "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return _("%(items)s and %(last)s") % {"items": ", ".join(parts[:-1]), "last": parts[-1]}


def plan_parts(plan: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a plan's parallel axes larger than one with its flags, and its precision."""
    axes = [
        f"{axis}{plan[axis]}"
        for axis in ("dp", "tp", "pp", "cp", "ep")
        if int(plan.get(axis) or 1) > 1
    ]
    if plan.get("sequence_parallel"):
        axes.append("sp")
    if plan.get("zero"):
        axes.append(f"z{plan['zero']}")
    if plan.get("recompute") not in (None, "none"):
        axes.append(f"rc-{plan['recompute']}")
    if plan.get("offload") not in (None, "none"):
        axes.append(f"off-{plan['offload']}")
    return axes or [_("1 device")], str(plan.get("precision") or "")


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Describe a plan in full words, for tooltips and screen readers."""
    names = {
        "dp": _("data parallel %(size)s"),
        "tp": _("tensor parallel %(size)s"),
        "pp": _("pipeline parallel %(size)s"),
        "cp": _("context parallel %(size)s"),
        "ep": _("expert parallel %(size)s"),
    }
    parts = [
        text % {"size": plan[axis]} for axis, text in names.items() if int(plan.get(axis) or 1) > 1
    ]
    if plan.get("zero"):
        parts.append(_("ZeRO stage %(stage)s") % {"stage": plan["zero"]})
    parts.append(f"{plan.get('precision', 'fp32')}")
    if plan.get("global_batch_size"):
        parts.append(_("%(count)s sequences per step") % {"count": plan["global_batch_size"]})
    return ", ".join(parts)


def _significant(real: float, digits: int) -> str:
    if real == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(real))))
    text = f"{real:,.{decimals}f}"
    return (
        text.rstrip("0").rstrip(".")
        if "." in text and float(text.replace(",", "")) == round(real)
        else text
    )
