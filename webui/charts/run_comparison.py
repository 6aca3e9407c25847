"""Runs beside each other: what each reached, and where their specs differ.

Pure; knows numbers and words, no database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting

_LESS, _MORE = "lower", "higher"
_LONGEST: Final = 60  # characters of a value of the spec
# say nothing about what a run does
_SILENT: Final = frozenset(("tags", "notes", "priority", "serve.api_key"))


@dataclass(frozen=True, slots=True)
class Measure:
    """A number that several runs have; `unit` is s, bytes, share, hours or a word, `better` which
    way is.
    """

    name: str
    title: str
    unit: str = ""
    better: str = ""
    says: str = ""


# what runs reach; evaluations add their own metrics in front
MEASURES: Final = (
    Measure("loss", "Loss", "", _LESS, "the newest"),
    Measure("val_loss", "Validation loss", "", _LESS, "the newest"),
    Measure("tokens_per_s", "Trained", "tokens/s", _MORE, "median over its steps"),
    Measure("mfu", "MFU", "share", _MORE, "median over its steps"),
    Measure(
        "inference/tokens_per_s",
        "Generated",
        "tokens/s",
        _MORE,
        "median over the times with something to do",
    ),
    Measure("ttft_p50", "First token", "s", _LESS, "half of all requests within"),
    Measure("ttft_p90", "First token, 90%", "s", _LESS, "nine of ten requests within"),
    Measure("tpot_p50", "Per token", "s", _LESS, "between two tokens of an answer, half within"),
    Measure("tpot_p90", "Per token, 90%", "s", _LESS, "nine of ten requests within"),
    Measure(
        "inference/prefix_hit_rate",
        "Prefix hits",
        "share",
        _MORE,
        "prompt tokens found in the cache",
    ),
    Measure(
        "inference/acceptance", "Drafts accepted", "share", _MORE, "of tokens that were drafted"
    ),
    Measure("requests", "Requests", "count", "", "that ended"),
    Measure("inference/answered", "Lines done", "count", "", "answered or judged"),
    Measure("memory/params_bytes", "Weights", "bytes", _LESS, "in memory"),
    Measure("memory/kv_cache_bytes", "Cache", "bytes", "", "in memory"),
    Measure("memory/allocated_bytes", "Memory", "bytes", _LESS, "allocated, the newest"),
    Measure("device_hours", "Device-hours", "hours", _LESS),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """`off` is the difference to the first run; `best` where no other run has a better number."""

    value: str
    off: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What one measure or key of the spec is in each run, in the runs' order."""

    title: str
    says: str
    better: str
    cells: list[Cell]


def reached(measures: Sequence[Measure], numbers: Sequence[Mapping[str, float]]) -> list[Row]:
    """A row for each measure that at least one run has."""
    return [
        Row(
            each.title,
            each.says,
            each.better,
            _cells(each, [told.get(each.name) for told in numbers]),
        )
        for each in measures
        if any(each.name in told for told in numbers)
    ]


def differing(specs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each key of the specs that is not the same in all of them; what one lacks rests on
    its default.
    """
    flat = [_flat(spec) for spec in specs]
    names = [
        name
        for name in dict.fromkeys(name for told in flat for name in told)
        if name not in _SILENT
    ]
    rows = []
    for name in sorted(names):
        values = [told.get(name) for told in flat]
        if any(value != values[0] for value in values):
            rows.append(Row(name, "", "", [Cell(_value(value)) for value in values]))
    return rows


def _cells(measure: Measure, values: Sequence[float | None]) -> list[Cell]:
    known = [value for value in values if value is not None]
    best = (
        min(known) if measure.better == _LESS else max(known) if measure.better == _MORE else None
    )
    stands_out = best is not None and len(known) > 1 and any(value != best for value in known)
    base = values[0]
    return [
        Cell(
            _shown(measure, value),
            _off(value, base) if place and value is not None and base else "",
            stands_out and value == best,
        )
        for place, value in enumerate(values)
    ]


def _off(value: float, base: float) -> str:
    ratio = value / base
    if ratio >= 2 or ratio <= 0.5:
        return f"×{formatting.quantity(ratio, 2)}"
    return "same" if abs(ratio - 1) < 5e-4 else f"{ratio - 1:+.1%}".replace("-", "−")


def _shown(measure: Measure, value: float | None) -> str:
    if value is None:
        return formatting.DASH
    match measure.unit:
        case "s":
            return formatting.seconds(value)
        case "bytes":
            return formatting.memory(value)
        case "share":
            return formatting.percent(value)
        case "count":
            return f"{value:,.0f}"
    unit = f" {measure.unit}" if measure.unit and measure.unit != "hours" else ""
    return (
        formatting.quantity(value, 4 if measure.better == _LESS and not measure.unit else 3) + unit
    )


def _flat(given: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def _value(value: Any) -> str:
    if value is None:
        return "default"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"…{text[-_LONGEST:]}"
