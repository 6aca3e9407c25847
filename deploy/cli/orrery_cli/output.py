"""How commands show results: tables, JSON documents, sparklines, durations."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
_COLORS = {
    "running": "green",
    "finished": "blue",
    "failed": "red",
    "cancelled": "yellow",
    "queued": "cyan",
    "up": "green",
    "silent": "yellow",
    "lost": "red",
}


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_json_line(document: Any) -> None:
    """Print one JSON document per line, at once."""
    print(json.dumps(document, ensure_ascii=False), flush=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str, right: Sequence[str] = ()
) -> None:
    """Print rows under column heads; `empty` if there are none. `right`: columns of numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    count = 0
    for row in rows:
        cells = ["–" if value is None or value == "" else str(value) for value in row]
        table.add_row(*(Text(cell, style=_COLORS.get(cell, "")) for cell in cells))
        count += 1
    if not count:
        print(empty)
        return
    # a pipe gets whole lines; a terminal wraps cells
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table)


def print_items(
    items: Sequence[Any],
    columns: Sequence[str],
    cells: Callable[[Any], Sequence[Any]],
    *,
    as_json: bool,
    empty: str,
    right: Sequence[str] = (),
) -> None:
    """Print a list of the API as `{"items": [...]}`, or as a table with `cells` of each item."""
    if as_json:
        print_json({"items": items})
        return
    print_table(columns, (cells(item) for item in items), empty=empty, right=right)


def sparkline(values: Iterable[Any], width: int = 32) -> str:
    """Bars of values in at most `width` characters, min to max; × is a value that is not finite."""
    numbers = [float(value) for value in values]  # "NaN" and "Infinity" are numbers, too
    if not numbers:
        return ""
    if len(numbers) > width:
        edges = [round(at * len(numbers) / width) for at in range(width + 1)]
        numbers = [numbers[end - 1] for end in edges[1:]]
    finite = [number for number in numbers if math.isfinite(number)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((number - low) * scale)] if math.isfinite(number) else "×" for number in numbers
    )


def number(value: Any, digits: int = 4) -> str:
    """A number with few digits; empty without one."""
    if value is None:
        return ""
    value = float(value)
    if abs(value) >= 1e4:
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """`42s`, `3m 10s`, `2h 5m`, `3d 4h`; empty without one."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    whole = max(0, round(seconds))
    for size, unit, smaller, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller}{small}"
    return f"{whole}s"


def age(time: str | None, until: str | None = None) -> str:
    """The duration since an ISO 8601 time, or between two."""
    if not time:
        return ""
    end = _parsed(until) if until else datetime.now(UTC)
    return duration((end - _parsed(time)).total_seconds())


def clock_time(time: str | None) -> str:
    """An ISO 8601 time in this machine's time zone."""
    return _parsed(time).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _parsed(time: str) -> datetime:
    return datetime.fromisoformat(time.replace("Z", "+00:00"))


def size(count: float | None) -> str:
    """Bytes as kB, MB, GB."""
    return (
        ""
        if count is None
        else f"{number(count, 3).replace('k', ' k')}B"
        if count >= 1e4
        else f"{count:g} B"
    )


def short_plan(plan: dict[str, Any] | None) -> str:
    """`dp4·tp2·z1 bf16`."""
    if not plan:
        return ""
    parts = [
        f"{axis}{plan[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if plan.get(axis, 1) > 1
    ]
    if plan.get("zero"):
        parts.append(f"z{plan['zero']}")
    return f"{'·'.join(parts) or 'dp1'} {plan.get('precision', '')}".strip()


def model_name(spec: dict[str, Any]) -> str:
    """The model of a spec by name."""
    model = spec.get("model")
    if isinstance(model, dict):
        model = model.get("name") or model.get("path") or model.get("package") or "own model"
    return str(model or "")
