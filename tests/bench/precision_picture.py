"""Draws docs/pictures/precision.png: training loss by precision, and differences from fp32."""

from __future__ import annotations

import statistics
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tests.bench.picture import save

COLOURS = {"fp32": "#444444", "bf16": "#1f77b4", "fp16": "#2ca02c", "fp8": "#d62728"}
SMOOTH = 15  # differences are averaged over this many steps: batches differ more than precisions
SIZE = {"width": 1000, "height": 420}


def draw(curves: dict[str, list[float]]) -> None:
    """Saves the picture. `curves`: training loss of each step by precision, including fp32."""
    save(build_figure(curves), "precision")


def build_figure(curves: dict[str, list[float]]) -> go.Figure:
    """Losses on the left; on the right differences from fp32 in percent, smoothed."""
    titles = ("Training loss, nats per token", f"Difference from fp32, %, mean of {SMOOTH} steps")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.08)
    full = curves["fp32"]
    for name, losses in curves.items():
        line: dict[str, Any] = {"color": COLOURS[name], "width": 1.5}
        steps = list(range(1, len(losses) + 1))
        figure.add_scatter(x=steps, y=losses, name=name, line=line, row=1, col=1)
        if name != "fp32":
            differences = smoothed(
                [100 * (loss / other - 1) for loss, other in zip(losses, full, strict=True)]
            )
            figure.add_scatter(
                x=steps[SMOOTH - 1 :],
                y=differences,
                name=name,
                line=line,
                showlegend=False,
                row=1,
                col=2,
            )
    figure.update_xaxes(title_text="step")
    figure.update_layout(
        template="plotly_white", margin={"l": 50, "r": 20, "t": 40, "b": 45}, **SIZE
    )
    return figure


def smoothed(values: list[float]) -> list[float]:
    """Moving average over SMOOTH steps; SMOOTH - 1 values shorter."""
    return [
        statistics.mean(values[last - SMOOTH : last]) for last in range(SMOOTH, len(values) + 1)
    ]
