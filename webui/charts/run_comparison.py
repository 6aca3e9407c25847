"""Compares runs: metrics of each, and where their specs differ. Pure functions.

Titles are marked here and translated by `compare_metrics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from webui.presentation import formatting

_LESS, _MORE = "lower", "higher"
_LONGEST: Final = 60  # characters of a value of the spec
# keys that do not change what a run does
_IGNORED: Final = frozenset(("tags", "notes", "priority", "serve.api_key", "script.secrets"))


_RECORDED: Final = ("config", "program")


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric to compare; `unit` is s, bytes, share, count, hours or text."""

    name: str
    title: str
    unit: str = ""
    better: str = ""
    description: str = ""


# evaluations add their own metrics in front
MEASURES: Final = (
    Measure("loss", _("Loss"), "", _LESS, _("newest value")),
    Measure("val_loss", _("Validation loss"), "", _LESS, _("newest value")),
    Measure(
        "tokens_per_s", _("Training throughput"), "tokens/s", _MORE, _("median over all steps")
    ),
    Measure("mfu", _("MFU"), "share", _MORE, _("median over all steps")),
    Measure(
        "inference/tokens_per_s",
        _("Generation throughput"),
        "tokens/s",
        _MORE,
        _("median over all reports"),
    ),
    Measure(
        "ttft_p50", _("Time to first token, p50"), "s", _LESS, _("half of all requests are faster")
    ),
    Measure(
        "ttft_p90", _("Time to first token, p90"), "s", _LESS, _("90% of all requests are faster")
    ),
    Measure("tpot_p50", _("Time per token, p50"), "s", _LESS, _("between two output tokens")),
    Measure("tpot_p90", _("Time per token, p90"), "s", _LESS, _("90% of all requests are faster")),
    Measure(
        "score_p50", _("Time per score, p50"), "s", _LESS, _("half of all requests are faster")
    ),
    Measure("score_p90", _("Time per score, p90"), "s", _LESS, _("90% of all requests are faster")),
    Measure("inference/scores_per_s", _("Scores"), "scores/s", _MORE, _("median over all reports")),
    Measure(
        "inference/prefix_hit_rate",
        _("Prefix cache hit rate"),
        "share",
        _MORE,
        _("prompt tokens in the cache"),
    ),
    Measure(
        "inference/acceptance",
        _("Draft acceptance rate"),
        "share",
        _MORE,
        _("accepted share of draft tokens"),
    ),
    Measure("requests", _("Requests"), "count", "", _("completed")),
    Measure(
        "inference/answered", _("Completed examples"), "count", "", _("generated or evaluated")
    ),
    Measure("memory/params_bytes", _("Weights"), "bytes", _LESS, _("in memory")),
    Measure("memory/kv_cache_bytes", _("KV cache"), "bytes", "", _("in memory")),
    Measure("memory/allocated_bytes", _("Memory"), "bytes", _LESS, _("allocated, newest value")),
    Measure("device_hours", _("Device-hours"), "hours", _LESS),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """`off` is the difference to the first run; `best` if no other run has a better value."""

    value: str
    off: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One metric or spec key of each run, in the runs' order."""

    title: str
    description: str
    better: str
    cells: list[Cell]


def compare_metrics(
    measures: Sequence[Measure], numbers: Sequence[Mapping[str, float]]
) -> list[Row]:
    """Return a row for each measure that at least one run has."""
    return [
        Row(
            gettext(measure.title),
            gettext(measure.description) if measure.description else "",
            measure.better,
            _cells(measure, [values.get(measure.name) for values in numbers]),
        )
        for measure in measures
        if any(measure.name in values for values in numbers)
    ]


def compare_specs(specs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each spec key that differs; a missing key has its default."""
    flat = [flat_spec(spec) for spec in specs]
    names = [
        name
        for name in dict.fromkeys(name for spec in flat for name in spec)
        if name not in _IGNORED
    ]
    rows = []
    for name in sorted(names):
        values = [spec.get(name) for spec in flat]
        if any(value != values[0] for value in values):
            rows.append(Row(name, "", "", [Cell(_value(value, name)) for value in values]))
    return rows


def _cells(measure: Measure, values: Sequence[float | None]) -> list[Cell]:
    known = [value for value in values if value is not None]
    best = (
        min(known) if measure.better == _LESS else max(known) if measure.better == _MORE else None
    )
    is_best_unique = best is not None and len(known) > 1 and any(value != best for value in known)
    base = values[0]
    return [
        Cell(
            _shown(measure, value),
            _off(value, base) if place and value is not None and base else "",
            is_best_unique and value == best,
        )
        for place, value in enumerate(values)
    ]


def _off(value: float, base: float) -> str:
    ratio = value / base
    if ratio >= 2 or ratio <= 0.5:
        return f"×{formatting.quantity(ratio, 2)}"
    return gettext("same") if abs(ratio - 1) < 5e-4 else f"{ratio - 1:+.1%}".replace("-", "−")


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


def flat_spec(spec: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The values of a spec by their paths, such as `train.seed`."""
    result: dict[str, Any] = {}
    for name, value in spec.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            result |= flat_spec(value, f"{path}.")
        else:
            result[path] = value
    return result


def _value(value: Any, name: str) -> str:
    if value is None:
        # a spec has defaults; what a program did not record is unknown
        is_recorded = name.startswith(_RECORDED)
        return gettext("not recorded") if is_recorded else gettext("default")
    if isinstance(value, float) and math.isfinite(value):
        value = float(f"{value:.10g}")  # 0.000102 instead of 0.00010200000000000001
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"…{text[-_LONGEST:]}"
