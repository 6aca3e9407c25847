"""Panels of dashboards in every kind and every empty state, from generated data."""

from __future__ import annotations

import math
from typing import Any, Final

from orchestrator.panels.data import Empty, EmptyCode, PanelData, PanelRun
from orchestrator.panels.spec import PanelSpec
from webui.panels.panel_cards import PanelCard, panel_card

_RUNS: Final = tuple(PanelRun(str(12 + i), f"lr-{1e-4 * 2**i:.0e}", "finished") for i in range(6))
_STEPS: Final = list(range(10, 1001, 10))
_LOSSES: Final = (1.4, 1.5, 1.6, 1.7, 1.8, None)
# code, subject, nearest name, detail
_EMPTY: Final[tuple[tuple[EmptyCode, str, str, str], ...]] = (
    ("gone", "val_los", "val_loss", ""),
    ("gone", "my/old/metric", "", ""),
    ("no_match", "^layer_[0-9]+/", "", ""),
    ("no_runs", "", "", ""),
    ("no_source", "", "", ""),
    ("bad_query", "lr > > 3", "", "at character 6: a value is expected"),
    ("no_points", "grad_norm", "", ""),
    ("no_axis", "flops", "", ""),
)


def gallery_panels() -> list[PanelCard]:
    """One card per kind and per reason to show nothing."""
    return [*_kinds(), *_empty()]


def _kinds() -> list[PanelCard]:
    one = _RUNS[:1]
    return [
        _card("line", "Loss of six runs", {"axis": "step", "curves": _curves()}, _RUNS, y_log=True),
        _card("line", "Smoothed", {"axis": "step", "curves": _curves()[:1]}, one, smoothing=0.9),
        _card("line", "Limits", {"axis": "step", "curves": _curves()}, _RUNS, y_min=1.5, y_max=3),
        _card(
            "bar",
            "Best validation loss",
            {
                "aggregate": "min",
                "bars": [
                    {"run": run.id, "metric": "val_loss", "value": 1.4 + 0.11 * (place - 3) ** 2}
                    for place, run in enumerate(_RUNS)
                ],
            },
            _RUNS,
        ),
        _card(
            "scatter",
            "Loss by learning rate",
            {
                "over": "runs",
                "metric": "loss",
                "x": "train.optimizer.lr",
                "y": "loss",
                "points": [
                    {"run": run.id, "x": 1e-4 * 2**place, "y": 1.4 + 0.11 * (place - 3) ** 2}
                    for place, run in enumerate(_RUNS)
                ],
            },
            _RUNS,
            x_metric="lr",
            x_log=True,
        ),
        _card(
            "histogram",
            "Step time",
            {
                "of": "values",
                "metric": "step_time_s",
                "over": "steps",
                "edges": [0.2 + 0.01 * i for i in range(21)],
                "counts": [round(300 * math.exp(-((i - 7) ** 2) / 12)) for i in range(20)],
                "total": 120_000,
                "drawn": 5000,
            },
            one,
            unit="s",
        ),
        _card(
            "heatmap",
            "Gradient norm by layer",
            {
                "axis": "step",
                "of": "metrics",
                "rows": [
                    {"run": one[0].id, "metric": f"grad_norm/layer_{i:02}"} for i in range(12)
                ],
                "x": [10.0 * i for i in range(41)],
                "z": [[_heat(row, column) for column in range(40)] for row in range(12)],
            },
            one,
            size="medium",
        ),
        _card(
            "table",
            "Results",
            {
                "of": "runs",
                "columns": [
                    {"name": "state", "title": "state", "unit": ""},
                    {"name": "train.optimizer.lr", "title": "train.optimizer.lr", "unit": ""},
                    {"name": "val_loss", "title": "min(val_loss)", "unit": "nats/token"},
                ],
                "rows": [
                    {
                        "run": run.id,
                        "cells": [run.state, 1e-4 * 2**i, 1.4 + i / 10 if i < 5 else None],
                    }
                    for i, run in enumerate(_RUNS)
                ],
                "missing": ["val_los"],
            },
            _RUNS,
        ),
        _card(
            "text",
            "Sample",
            {
                "of": "media",
                "items": [_text("Once upon a time there was a loss that fell.\nIt fell far.")],
                "steps": [1000],
                "more": 2,
            },
            one,
        ),
        panel_card(
            PanelSpec(
                id="gallery-markdown",
                kind="markdown",
                text="# Summary\n\nThe **third** learning rate is best: see [the runs](/runs/)."
                "\n\n- loss falls\n- `grad_norm` is calm",
            )
        ),
    ]


def _empty() -> list[PanelCard]:
    return [
        panel_card(
            PanelSpec(id=f"gallery-empty-{place}", kind="line", title=subject, metrics=["loss"]),
            frozen=PanelData("line", subject, empty=Empty(code, subject, near, detail)).to_dict(),
        )
        for place, (code, subject, near, detail) in enumerate(_EMPTY)
    ]


def _card(
    kind: str,
    title: str,
    content: dict[str, Any],
    runs: tuple[PanelRun, ...],
    unit: str = "",
    **more: Any,
) -> PanelCard:
    id = f"gallery-{kind}-{len(title)}"
    spec = PanelSpec.from_dict({"id": id, "kind": kind, "metrics": ["loss"], **more})
    return panel_card(spec, frozen=PanelData(kind, title, unit, runs, content).to_dict())


def _curves() -> list[dict[str, Any]]:
    return [
        {
            "run": run.id,
            "metric": "loss",
            "x": _STEPS,
            "y": [
                1.3
                + 0.1 * place
                + 3 * math.exp(-step / (120 + 30 * place))
                + 0.05 * math.sin(step * (0.3 + place / 7))
                for step in _STEPS
            ],
            "low": None,
            "high": None,
            "total_points": len(_STEPS),
        }
        for place, run in enumerate(_RUNS)
    ]


def _heat(row: int, column: int) -> float | None:
    is_gap = row == 4 and 10 < column < 16
    return None if is_gap else abs(math.sin(column / 9 + row / 3)) + row / 9


def _text(text: str) -> dict[str, Any]:
    place = {"run": _RUNS[0].id, "name": "sample", "step": 1000, "index": 0}
    return {**place, "caption": "temperature 0.7", "image": None, "data": text}
