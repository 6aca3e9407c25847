"""Compares ranks: newest metrics of each, and which are slower than the median. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.presentation import formatting

SLOW: Final = 1.15  # ratio to the median step time that counts as slow
MOST_ROWS: Final = 64
TITLES: Final = {
    "step_time_s": gettext_noop("step"),
    "data_time_s": gettext_noop("data"),
    "comm/exposed_s": gettext_noop("exposed communication"),
    "tokens_per_s": gettext_noop("tokens/s"),
    "mfu": "MFU",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """`rows`: rank, formatted values, percent of the slowest step, whether it is slow.

    The slowest rank comes first.
    """

    titles: list[str]
    rows: list[dict[str, Any]]
    summary: str
    left_out: int


def spread(by_rank: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> Spread | None:
    """Compare ranks; None without any rank's metrics."""
    if not by_rank or not names:
        return None
    steps = {
        rank: number
        for rank, values in by_rank.items()
        if (number := formatting.number(values.get("step_time_s")))
    }
    middle, slowest = (
        (median_low(list(steps.values())), max(steps.values())) if steps else (0.0, 0.0)
    )
    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "cells": [_cell(name, values.get(name)) for name in names],
            "part": f"{100 * steps.get(rank, 0) / slowest:.1f}" if slowest else "0",
            "slow": bool(middle) and len(steps) > 1 and steps.get(rank, 0) > SLOW * middle,
        }
        for rank, values in by_rank.items()
    ]
    rows.sort(key=lambda row: (-float(row["part"]), row["rank"]))
    return Spread(
        [_(TITLES[name]) for name in names],
        rows[:MOST_ROWS],
        _summary(steps, middle, slowest),
        max(0, len(rows) - MOST_ROWS),
    )


def _summary(steps: Mapping[int, float], middle: float, slowest: float) -> str:
    if len(steps) < 2:
        return _("One rank reports its step time.") if steps else _("No step times reported yet.")
    rank = max(steps, key=lambda key: steps[key])
    if slowest > SLOW * middle:
        return _("Rank %(rank)s is slow: %(time)s per step, %(share)s above the median.") % {
            "rank": rank,
            "time": formatting.duration(slowest),
            "share": f"{100 * (slowest / middle - 1):.0f}%",
        }
    return _("%(count)s ranks within %(share)s of each other, median %(time)s per step.") % {
        "count": len(steps),
        "share": f"{100 * (slowest / min(steps.values()) - 1):.0f}%",
        "time": formatting.duration(middle),
    }


def _cell(name: str, value: float | None) -> str:
    if name == "mfu":
        return formatting.percent(value)
    return formatting.quantity(value) if name == "tokens_per_s" else formatting.duration(value)
