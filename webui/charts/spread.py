"""Ranks beside each other: newest numbers of each, and how far each is from the median. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Final

from webui.presentation import formatting

SLOW: Final = 1.15  # of the median step time: worth a look
MOST_ROWS: Final = 64
TITLES: Final = {
    "step_time_s": "step",
    "data_time_s": "data",
    "comm/exposed_s": "exposed communication",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """`rows`: rank, values in words, share of the slowest step (per cent), whether it is slow;
    slowest first.
    """

    titles: list[str]
    rows: list[dict[str, Any]]
    sentence: str
    left_out: int


def spread(by_rank: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> Spread | None:
    """None where fewer than one rank tells."""
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
        [TITLES[name] for name in names],
        rows[:MOST_ROWS],
        _sentence(steps, middle, slowest),
        max(0, len(rows) - MOST_ROWS),
    )


def _sentence(steps: Mapping[int, float], middle: float, slowest: float) -> str:
    if len(steps) < 2:
        return "One rank tells its step time." if steps else "No rank has told its step time yet."
    rank = max(steps, key=lambda key: steps[key])
    if slowest > SLOW * middle:
        above = f"{100 * (slowest / middle - 1):.0f}% above the median"
        return f"Rank {rank} is slow: {formatting.duration(slowest)} a step, {above}."
    within = f"{100 * (slowest / min(steps.values()) - 1):.0f}%"
    return f"{len(steps)} ranks within {within} of each other, median {formatting.duration(middle)} a step."


def _cell(name: str, value: float | None) -> str:
    if name == "mfu":
        return formatting.percent(value)
    return formatting.quantity(value) if name == "tokens_per_s" else formatting.duration(value)
