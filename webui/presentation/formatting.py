"""Numbers, ages and plans as people read them. Pure functions; knows no page and no database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"


def number(value: Any) -> float | None:
    """A finite number, or None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def quantity(value: Any, digits: int = 3) -> str:
    """A count or rate with a metric suffix, `digits` significant: 1234567 → 1.23M."""
    real = number(value)
    if real is None:
        return DASH
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(real) >= size:
            scale = 1e3 if suffix == "k" else size
            return _significant(real / scale, digits) + suffix
    return _significant(real, max(digits, len(str(int(abs(real))))))


def memory(value: Any) -> str:
    """Bytes in the binary unit that fits: 1.50 GiB."""
    real = number(value)
    if real is None:
        return DASH
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(real) >= 1024**power:
            return f"{_significant(real / 1024**power, 3)} {unit}"
    return f"{real:.0f} B"


def percent(value: Any) -> str:
    """A fraction as per cent: 0.4312 → 43.1%."""
    real = number(value)
    return DASH if real is None else f"{_significant(100 * real, 3)}%"


def duration(value: Any) -> str:
    """Seconds as the two largest units that matter: 7500 → 2 h 05 min."""
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
    return f"{minutes} min {seconds:02} s"


def seconds(value: Any, digits: int = 3) -> str:
    """A time that is predicted or compared: three digits from microseconds to a minute, then as
    `duration`.

    More `digits` tell close times apart: they stay seconds up to a thousand.
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
    """How long ago, in one unit: 42 s ago, 3 min ago, 5 h ago, 2 d ago."""
    whole = max(0, round(seconds))
    if whole < 3:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} ago"
    return f"{whole} s ago"


def count(value: int, noun: str, plural: str = "") -> str:
    """1 run, 2 runs."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    return (
        parts[0]
        if len(parts) == 1
        else ", ".join(parts[:-1]) + " and " + parts[-1]
        if parts
        else ""
    )


def plan_words(plan: Mapping[str, Any]) -> tuple[list[str], str]:
    """A plan's axes that are larger than one, its ZeRO stage and flags; and its precision."""
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
    return axes or ["1 device"], str(plan.get("precision") or "")


def plan_sentence(plan: Mapping[str, Any]) -> str:
    """The same plan in full words, for a tooltip and for a person who reads with their ears."""
    names = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    parts = [
        f"{word} parallel {plan[axis]}"
        for axis, word in names.items()
        if int(plan.get(axis) or 1) > 1
    ]
    if plan.get("zero"):
        parts.append(f"ZeRO stage {plan['zero']}")
    parts.append(f"{plan.get('precision', 'fp32')}")
    if plan.get("global_batch_size"):
        parts.append(f"{plan['global_batch_size']} sequences a step")
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
