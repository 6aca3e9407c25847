"""Takes docs/pictures/run.png, the picture of the README: a finished run of llama-tiny on 2 slots.

`python -m tests.bench.run_picture`; `--steps N` trains shorter. Needs Debian's chromium and a quiet
machine, because the picture shows measured next to predicted numbers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.bench.bench_flight import log_in
from tests.bench.bench_page import CHROMIUM
from tests.bench.record import ROOT
from tests.browser.polling import wait_until
from tests.flows.embedded import Orrery

PLAN = {
    "dp": 2,
    "zero": 1,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "precision": "fp32",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    train = {
        "steps": steps,
        "seq_len": 128,
        "checkpoint": {"every_steps": max(1, steps // 15), "keep": 2},
        "eval": {"every_steps": max(1, steps // 30), "batches": 4},
    }
    with tempfile.TemporaryDirectory() as folder:
        orrery = Orrery(Path(folder) / "home", devices=2)
        try:
            orrery.start()
            spec = {"kind": "train", "model": "llama-tiny", "plan": PLAN, "train": train}
            run = orrery.submit(spec, name="first flight")
            orrery.until_state(run, "finished", seconds=3600)
            picture(orrery, f"/runs/{run}/", "run")
        finally:
            orrery.close()


def picture(orrery: Orrery, address: str, name: str) -> None:
    """Saves the top of a page with drawn charts."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        page = browser.new_page(viewport={"width": 1280, "height": 960})
        log_in(page, orrery)
        page.goto(orrery.url + address)
        wait_until(page, "window.orrery?.charts?.charts.slice(0, 3).every((one) => one.drawn)")
        page.screenshot(path=ROOT / "docs" / "pictures" / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
