"""docs/pictures/precision.png: training loss by precision, and how far each narrow one is from fp32.

Drawn by Plotly in a headless Chromium, as the pages draw; skipped with a word where there is no Chromium.
"""

from __future__ import annotations

import os
import shutil
import statistics
from typing import Any

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from tests.bench.record import ROOT

COLOURS = {"fp32": "#444444", "bf16": "#1f77b4", "fp16": "#2ca02c", "fp8": "#d62728"}
SMOOTH = 15  # steps over which differences are averaged: batches differ by more than precisions do
SIZE = {"width": 1000, "height": 420}


def draw(curves: dict[str, list[float]]) -> None:
    """`curves`: training loss of every step by precision, fp32 among them."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        print("no Chromium on this machine: the picture of the curves is not drawn anew")
        return
    figure = figure_of(curves)
    page_text = (
        f"<script>{get_plotlyjs()}</script><div id='here'></div>"
        f"<script>Plotly.newPlot('here', {figure.to_json()})</script>"
    )
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": SIZE["width"] + 16, "height": SIZE["height"] + 16})
        page.set_content(page_text)
        page.wait_for_selector("#here .main-svg")
        page.locator("#here").screenshot(path=ROOT / "docs" / "pictures" / "precision.png")
        browser.close()


def figure_of(curves: dict[str, list[float]]) -> go.Figure:
    """Left the losses, right the differences from fp32 in percent, averaged over SMOOTH steps."""
    titles = ("Training loss, nats a token", f"Difference from fp32, %, mean of {SMOOTH} steps")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.08)
    full = curves["fp32"]
    for name, losses in curves.items():
        line: dict[str, Any] = {"color": COLOURS[name], "width": 1.5}
        steps = list(range(1, len(losses) + 1))
        figure.add_scatter(x=steps, y=losses, name=name, line=line, row=1, col=1)
        if name != "fp32":
            apart = smoothed([100 * (loss / other - 1) for loss, other in zip(losses, full, strict=True)])
            figure.add_scatter(x=steps[SMOOTH - 1 :], y=apart, name=name, line=line, showlegend=False, row=1, col=2)
    figure.update_xaxes(title_text="step")
    figure.update_layout(template="plotly_white", margin={"l": 50, "r": 20, "t": 40, "b": 45}, **SIZE)
    return figure


def smoothed(values: list[float]) -> list[float]:
    return [statistics.mean(values[last - SMOOTH : last]) for last in range(SMOOTH, len(values) + 1)]
