"""A finished run's page with nine charts of 1,000 steps, cold cache: bytes, requests, first chart.

Bytes are those over the wire with headers; the slow network has 1.6 Mbit/s and 150 ms per round
trip. Needs Debian's chromium.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, sync_playwright

from tests.bench.bench_flight import log_in
from tests.bench.bench_page import CHROMIUM
from tests.bench.record import record
from tests.flows.embedded import Orrery

STEPS = 1000
ROUNDS = 5
NAMES = (
    *("loss", "tokens_per_s", "mfu", "grad_norm", "lr", "step_time_s"),
    *("own/accuracy", "own/recall", "own/margin"),
)
SLOW = {"downloadThroughput": 1.6e6 / 8, "uploadThroughput": 1.6e6 / 8, "latency": 150}
DRAWN = ".chart .js-plotly-plot .scatterlayer .trace"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        orrery = Orrery(Path(folder) / "home", devices=1)
        try:
            orrery.start()
            run = finished_run(orrery)
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
                measure(browser, orrery, run)
                browser.close()
        finally:
            orrery.close()


def finished_run(orrery: Orrery) -> str:
    assert orrery.client is not None
    run = orrery.submit({"kind": "external", "external": {}}, "nine charts")
    source, began = random.Random(1), time.time() - STEPS
    points = [
        {
            "rank": 0,
            "seq": step,
            "step": step,
            "tokens": 4096 * step,
            "time": began + step,
            "values": {name: 1 / step + source.random() for name in NAMES},
        }
        for step in range(1, STEPS + 1)
    ]
    answer = orrery.client.post(f"runs/{run}/points", json={"points": points})
    assert answer.status_code in (200, 201, 202), answer.text
    answer = orrery.client.post(f"runs/{run}/finish", json={"status": "finished"})
    assert answer.status_code == 200, answer.text
    return run


def measure(browser: Browser, orrery: Orrery, run: str) -> None:
    first = browser.new_context()
    page = first.new_page()
    log_in(page, orrery)
    state: Any = first.storage_state()
    first.close()
    local = [load(browser, orrery, run, state, None) for _ in range(ROUNDS)]
    slow = [load(browser, orrery, run, state, SLOW) for _ in range(ROUNDS)]
    what = "finished run, 9 charts of 1,000 steps, cold cache"
    rows = (
        ("bytes over the wire", [one["bytes"] / 1000 for one in local], "kB", "<= 500"),
        ("requests", [one["requests"] for one in local], "requests", "<= 20"),
        ("first chart, localhost", [one["first_s"] for one in local], "s", "<= 1"),
        ("first chart, 1.6 Mbit/s and 150 ms", [one["first_s"] for one in slow], "s", "<= 4"),
    )
    for label, values, unit, figure in rows:
        record(
            "page_delivery",
            what=f"{what}: {label}",
            value=statistics.median(values),
            unit=unit,
            figure=figure,
            rounds=ROUNDS,
            highest=max(values),
            charts=local[0]["charts"],
        )
    for size, address in sorted(local[0]["sizes"], reverse=True):
        print(f"{size / 1000:8.1f} kB  {address}")


def load(browser: Browser, orrery: Orrery, run: str, state: Any, network: Any) -> dict[str, Any]:
    """One load in a fresh context, so with an empty cache."""
    context = browser.new_context(viewport={"width": 1440, "height": 2600}, storage_state=state)
    page = context.new_page()
    session = context.new_cdp_session(page)
    addresses: dict[str, str] = {}
    sizes: dict[str, float] = {}
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": False})
    watch(session, addresses, sizes)
    if network is not None:
        session.send("Network.emulateNetworkConditions", {"offline": False, **network})
    started = time.monotonic()
    page.goto(f"{orrery.url}/runs/{run}/", wait_until="commit")
    page.wait_for_selector(DRAWN, state="attached", timeout=60_000)
    first_s = time.monotonic() - started
    page.wait_for_load_state("load")
    page.wait_for_timeout(3000 if network is None else 500)
    charts = page.evaluate("document.querySelectorAll('.chart .js-plotly-plot').length")
    context.close()
    return {
        "first_s": first_s,
        "bytes": sum(sizes.values()),
        "requests": len(addresses),
        "charts": charts,
        "sizes": [(sizes.get(key, 0.0), address) for key, address in addresses.items()],
    }


def watch(session: CDPSession, addresses: dict[str, str], sizes: dict[str, float]) -> None:
    def sent(event: dict[str, Any]) -> None:
        if not event["request"]["url"].startswith(("data:", "blob:")):
            addresses[event["requestId"]] = event["request"]["url"]

    def finished(event: dict[str, Any]) -> None:
        if event["requestId"] in addresses:
            sizes[event["requestId"]] = event["encodedDataLength"]

    session.on("Network.requestWillBeSent", sent)
    session.on("Network.loadingFinished", finished)


if __name__ == "__main__":
    main()
