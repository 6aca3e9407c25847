"""Saves a Plotly figure as docs/pictures/<name>.png through a headless Chromium.

Without Chromium it prints a note and saves nothing.
"""

from __future__ import annotations

import os
import shutil

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

from tests.bench.record import ROOT


def save(figure: go.Figure, name: str) -> None:
    """Draws the figure at the width and height of its layout."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        print(f"no Chromium on this machine: docs/pictures/{name}.png is not updated")
        return
    text = (
        f"<script>{get_plotlyjs()}</script><div id='here'></div>"
        f"<script>Plotly.newPlot('here', {figure.to_json()})</script>"
    )
    size = {"width": int(figure.layout.width) + 16, "height": int(figure.layout.height) + 16}
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=path, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=size)
        page.set_content(text)
        page.wait_for_selector("#here .main-svg")
        page.locator("#here").screenshot(path=ROOT / "docs" / "pictures" / f"{name}.png")
        browser.close()
