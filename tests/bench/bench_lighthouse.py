"""Lighthouse scores of the main pages, desktop and mobile: the median of ROUNDS loads.

Installs Lighthouse from npm into a folder of the user's cache; it is no dependency of the product.
Needs node and Debian's chromium. Scores of performance are only true on a quiet machine;
`--rounds N` loads each page N times, `--only accessibility,best-practices` leaves out others,
`--pages login,runs` measures some pages and `--forms mobile` one form.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from tests.bench.bench_flight import log_in
from tests.bench.bench_page import CHROMIUM
from tests.bench.bench_page_delivery import finished_run
from tests.bench.record import record
from tests.flows.embedded import Orrery, free_port

VERSION: Final = "12"
CATEGORIES: Final = ("performance", "accessibility", "best-practices")
PAGES: Final = {
    "login": "/login/",
    "overview": "/",
    "runs": "/runs/",
    "run": "/runs/{run}/",
    "compare": "/runs/compare/?runs={run},{other}",
    "new run": "/runs/new/",
    "queue": "/queue/",
    "fleet": "/fleet/",
    "experiments": "/experiments/",
    "dashboards": "/dashboards/",
    "reports": "/reports/",
    "planner": "/planner/",
    "data": "/data/",
    "alerts": "/alerts/",
}
CHARTS: Final = ("run", "compare", "planner")  # Plotly blocks a throttled CPU


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CATEGORIES))
    parser.add_argument("--pages", default=",".join(PAGES))
    parser.add_argument("--forms", default="desktop,mobile")
    options = parser.parse_args()
    pages = {name: PAGES[name] for name in options.pages.split(",")}
    program = installed()
    with tempfile.TemporaryDirectory() as folder:
        orrery = Orrery(Path(folder) / "home", devices=1)
        try:
            orrery.start()
            of_runs = [name for name, path in pages.items() if "{" in path]
            runs = {name: finished_run(orrery) for name in ("run", "other") if of_runs}
            port = free_port()
            with sync_playwright() as play:
                # Lighthouse joins this browser, clears its caches and keeps its cookies
                context = play.chromium.launch_persistent_context(
                    Path(folder) / "profile",
                    executable_path="/usr/bin/chromium",
                    args=[*CHROMIUM, f"--remote-debugging-port={port}"],
                )
                logged_in = False
                for name, path in pages.items():
                    if name != "login" and not logged_in:
                        log_in(context.pages[0], orrery)
                        logged_in = True
                    for form in options.forms.split(","):
                        address = orrery.url + path.format(**runs)
                        measure(program, name, form, address, port, options)
                        context.pages[0].goto("about:blank")
                context.close()
        finally:
            orrery.close()


def installed() -> Path:
    """The program; installs it if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "orrery-bench" / f"lighthouse-{VERSION}"
    program = folder / "node_modules" / ".bin" / "lighthouse"
    if not program.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(dir=folder.parent)  # an interrupted installation is not used
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"]
        try:
            subprocess.run([*command, part, f"lighthouse@{VERSION}"], check=True)
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete one of earlier
            Path(part).rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return program


def measure(program: Path, name: str, form: str, address: str, port: int, options: Any) -> None:
    """Records the median score of each category and prints the audits that fail."""
    reports = [report(program, form, address, port, options.only) for _ in range(options.rounds)]
    for category in options.only.split(","):
        scores = [100 * one["categories"][category]["score"] for one in reports]
        goal = 95 if form == "desktop" else 90
        if category == "performance" and name in CHARTS and form == "mobile":
            goal = 75
        record(
            "lighthouse",
            what=f"{name}, {form}: {category}",
            value=statistics.median(scores),
            unit="points",
            figure=f">= {goal}",
            rounds=options.rounds,
            lowest=min(scores),
            lighthouse=reports[0]["lighthouseVersion"],
        )
        for reference in reports[-1]["categories"][category]["auditRefs"]:
            audit = reports[-1]["audits"][reference["id"]]
            if reference["weight"] and audit["score"] is not None and audit["score"] < 0.9:
                print(f"    {audit['id']}: {audit['title']} {audit.get('displayValue', '')}")
                for item in audit.get("details", {}).get("items", ())[:3]:
                    print(f"        {json.dumps(item)[:240]}")


def report(program: Path, form: str, address: str, port: int, only: str) -> dict[str, Any]:
    """One load with an empty cache, as JSON."""
    command = [
        str(program),
        address,
        "--quiet",
        "--output=json",
        "--output-path=stdout",
        f"--only-categories={only}",
        f"--port={port}",
        "--max-wait-for-load=90000",
        *(["--preset=desktop"] if form == "desktop" else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"Lighthouse failed for {address}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    if result.get("runtimeError"):
        raise RuntimeError(f"Lighthouse failed for {address}: {result['runtimeError']['message']}")
    return result


if __name__ == "__main__":
    main()
