"""Charts of collective bus bandwidth by message size and matmul speed by size. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from webui.presentation import formatting

HUES = {
    "all_reduce": "throughput",
    "all_gather": "mfu",
    "reduce_scatter": "lr",
    "all_to_all": "event",
    "send_recv": "loss",
}


def chart(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `{curves: [{name, hue, line, spots}], x_ticks, y_ticks}` on logarithmic axes.

    Places are percent of a box; y counts downward.
    """
    sizes = sorted({row["bytes"] for row in rows})
    rates = [row["bus_bytes_per_s"] for row in rows]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    left, right = math.log2(sizes[0]), math.log2(sizes[-1])

    def place(row: Mapping[str, Any]) -> tuple[float, float]:
        x = 100 * (math.log2(row["bytes"]) - left) / max(right - left, 1e-9)
        return round(x, 2), round(
            100 - 100 * (math.log10(row["bus_bytes_per_s"]) - low) / max(high - low, 1), 2
        )

    curves = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        some = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["bytes"])
        spots = [{"x": place(row)[0], "y": place(row)[1], "label": _label(row)} for row in some]
        line = " ".join(f"{spot['x']},{spot['y']}" for spot in spots)
        curves.append(
            {
                "name": kind.replace("_", "-"),
                "hue": HUES.get(kind, "other-series"),
                "line": line,
                "spots": spots,
            }
        )
    every = 2 if len(sizes) > 6 else 1
    return {
        "curves": curves,
        "x_ticks": [
            {"at": place({"bytes": size, "bus_bytes_per_s": 1.0})[0], "label": _size(size)}
            for size in sizes[::every]
        ],
        "y_ticks": [
            {
                "at": round(100 - 100 * (power - low) / max(high - low, 1), 2),
                "label": rate(10.0**power),
            }
            for power in range(low, high + 1)
        ],
    }


def rows(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table of time and bandwidth: one row per size, one column per kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in measured))
    by_place = {(row["kind"], row["bytes"]): row for row in measured}
    sizes = sorted({row["bytes"] for row in measured})
    return {
        "kinds": [kind.replace("_", "-") for kind in kinds],
        "sizes": [
            {"label": _size(size), "cells": [_cell(by_place.get((kind, size))) for kind in kinds]}
            for size in sizes
        ],
    }


def products(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return TFLOP/s: one row per size, one cell per precision, bars relative to the maximum."""
    fastest = max(row["tflops"] for row in measured)
    precisions = list(dict.fromkeys(row["precision"] for row in measured))
    by_place = {(row["precision"], row["size"]): row["tflops"] for row in measured}
    sizes = sorted({row["size"] for row in measured})
    return {
        "precisions": precisions,
        "sizes": [
            {
                "size": size,
                "cells": [
                    {
                        "precision": name,
                        "label": formatting.quantity(by_place.get((name, size))),
                        "at": round(100 * by_place.get((name, size), 0.0) / fastest, 1),
                    }
                    for name in precisions
                ],
            }
            for size in sizes
        ],
    }


def _cell(row: Mapping[str, Any] | None) -> dict[str, str]:
    if row is None:
        return {"seconds": formatting.DASH, "rate": ""}
    return {"seconds": formatting.seconds(row["seconds"]), "rate": rate(row["bus_bytes_per_s"])}


def _label(row: Mapping[str, Any]) -> str:
    cell = _cell(row)
    kind = row["kind"].replace("_", "-")
    return f"{kind}, {_size(row['bytes'])}: {cell['seconds']}, {cell['rate']}"


def rate(bytes_per_s: float) -> str:
    """Format a bandwidth in decimal units: `540 MB/s`."""
    for power, unit in ((9, "GB/s"), (6, "MB/s"), (3, "kB/s")):
        if bytes_per_s >= 10**power:
            return f"{formatting.quantity(bytes_per_s / 10**power)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def _size(size: int) -> str:
    return formatting.memory(size)
