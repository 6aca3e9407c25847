"""Data of panels that show one number per run: bars, scatter plots, histograms and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from orchestrator.common.units import iso
from orchestrator.panels.curves import finite
from orchestrator.panels.spec import PanelSpec
from orchestrator.run_table import selectors as run_table
from orchestrator.run_table.columns import Column, ColumnNames, read_column
from orchestrator.run_table.export import run_value
from orchestrator.run_table.language import QueryError
from orchestrator.runs.models import ParameterName, Run
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.catalog.metrics import run_metric_unit

_POINTS: Final = 5000  # of one run in a scatter plot or histogram


def bars(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """`{bars: [{run, metric, value}], unit}`; runs without a value are left out."""
    numbers = telemetry.numbers_of(runs, names)
    rows = [
        {"run": str(run.pk), "metric": name, "value": value}
        for name in names
        for run in runs
        if (value := _number(numbers, run, name, panel.aggregate)) is not None
    ]
    return {"bars": rows, "aggregate": panel.aggregate, "unit": _unit(runs, names)}


def scatter(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """`{over, x, y, points: [{run, x, y}]}`: a point per run, or per step of a single run.

    Raises QueryError for an x axis that no run has.
    """
    name = names[0]
    column = read_column(panel.x_metric, _known(runs, names))
    if len(runs) == 1 and column.source == "metric":
        return {**_over_steps(runs[0], column.name, name), "unit": _unit(runs, names)}
    upwards = Column("metric", name, panel.aggregate)
    values = run_values(runs, [column, upwards])
    points = [
        {"run": str(run.pk), "x": x, "y": y}
        for run in runs
        if (x := values[run.pk][_key(column)]) is not None
        and (y := values[run.pk][_key(upwards)]) is not None
    ]
    return {
        "over": "runs",
        "metric": name,
        "x": column.key,
        "y": upwards.key,
        "points": points,
        "unit": _unit(runs, names),
    }


def histogram(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """`{over, edges, counts, total, values}`: of a metric over runs, or over steps of one run."""
    name = names[0]
    if len(runs) == 1:
        answer = telemetry.series(run=runs[0], name=name, points=_POINTS)
        values = list(finite(answer.y))
        over, total = "steps", answer.total_points
    else:
        numbers = telemetry.numbers_of(runs, [name])
        some = (_number(numbers, run, name, panel.aggregate) for run in runs)
        values = [value for value in some if value is not None]
        over, total = "runs", len(values)
    if not values:
        return {"of": "values", "metric": name, "edges": [], "counts": []}
    counts, edges = np.histogram(np.array(values), bins=panel.bins)
    return {
        "of": "values",
        "metric": name,
        "over": over,
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "total": total,
        "drawn": len(values),
        "aggregate": panel.aggregate,
        "unit": _unit(runs, names),
    }


def table(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """`{of: runs, columns: [{title, unit}], rows: [{run, cells}], missing}`: a row per run."""
    known = _known(runs, names)
    columns, missing = list[Column](), list[str]()
    for text in panel.columns:
        try:
            columns.append(read_column(text, known))
        except QueryError:
            missing.append(text)
    columns += [Column("metric", name, panel.aggregate) for name in names]
    values = run_values(runs, columns)
    titles = [
        {
            "name": column.name,
            "title": column.key,
            "unit": _unit(runs, [column.name]) if column.source == "metric" else "",
        }
        for column in columns
    ]
    rows = [
        {"run": str(run.pk), "cells": [values[run.pk].get(_key(column)) for column in columns]}
        for run in runs
    ]
    return {"of": "runs", "columns": titles, "rows": rows, "missing": missing}


def run_values(runs: Sequence[Run], columns: Sequence[Column]) -> dict[int, dict[str, Any]]:
    """`{run: {column: value}}`; times as ISO 8601."""
    metrics = {column.name for column in columns if column.source == "metric"}
    numbers = telemetry.numbers_of(runs, metrics) if metrics else {}
    config = run_table.column_values(
        [run.pk for run in runs], [column for column in columns if column.source == "config"]
    )
    result: dict[int, dict[str, Any]] = {}
    for run in runs:
        own: dict[str, Any] = {}
        for column in columns:
            if column.source == "metric":
                own[_key(column)] = _number(numbers, run, column.name, column.aggregate)
            elif column.source == "config":
                own[_key(column)] = config[run.pk].get(column.key)
            else:
                value = run_value(run, column.name)
                own[_key(column)] = iso(value) if hasattr(value, "isoformat") else value
        result[run.pk] = own
    return result


def _over_steps(run: Run, x: str, y: str) -> dict[str, Any]:
    """Two metrics of one run; each y with the newest x at or before its step."""
    across = telemetry.series(run=run, name=x, points=_POINTS)
    up = telemetry.series(run=run, name=y, points=_POINTS)
    places = np.searchsorted(np.asarray(across.x), np.asarray(up.x), "right") - 1
    points = [
        {"run": str(run.pk), "x": across.y[place], "y": value, "step": step}
        for place, step, value in zip(places.tolist(), up.x, up.y, strict=True)
        if place >= 0
    ]
    points = [point for point in points if all(map(np.isfinite, (point["x"], point["y"])))]
    return {"over": "steps", "metric": y, "x": x, "y": y, "points": points}


def _known(runs: Sequence[Run], names: Sequence[str]) -> ColumnNames:
    """What a column may name: metrics of these runs, and spec values of their owners' runs."""
    metrics = telemetry.metric_names_of_runs([run.pk for run in runs])
    owners = {run.owner_id for run in runs}
    config = ParameterName.objects.filter(owner__in=owners).values_list("name", flat=True)
    return ColumnNames(frozenset((*metrics, *names)), frozenset(config))


def _key(column: Column) -> str:
    return f"{column.source}:{column.aggregate}:{column.name}"


def _number(numbers: Any, run: Run, name: str, aggregate: str) -> float | None:
    own = numbers[run.pk].get(name)
    value = getattr(own, aggregate) if own is not None else None
    return None if value is None else float(value)


def _unit(runs: Sequence[Run], names: Sequence[str]) -> str:
    units = {run_metric_unit(name, runs[0].spec) for name in names} if runs else set()
    return units.pop() if len(units) == 1 else ""
