"""The run page in Chromium: time to first chart, size of JavaScript, main thread and heap growth.

Twelve charts are live; the heap test replays two hours of frames; no other host may be requested.
Needs Debian's chromium.
"""

from __future__ import annotations

import gzip
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import CDPSession, Page, Response, sync_playwright

from tests.bench.bench_flight import log_in
from tests.bench.record import record
from tests.flows.embedded import Orrery

NAMES = [
    "loss",
    "tokens_per_s",
    "mfu",
    "grad_norm",
    "lr",
    "step_time_s",
    *(f"own/{letter}" for letter in "abcdef"),
]
CHROMIUM = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--js-flags=--expose-gc",
]
FRAMES = 2 * 3600 * 4  # two hours at the four frames per second that ingest publishes
LIVE_S = 20.0

REPLAY = """async ([names, from, count, step0]) => {
  const live = window.orrery.live;
  for (let i = 0; i < count; i++) {
    const seq = from + i, values = {};
    const at = (k) => [step0 + 3 * i + k, Math.sin(seq / 50) + Math.random()];
    for (const name of names) values[name] = [0, 1, 2].map(at);
    const frame = { type: "points", attempt: 1, rank: 0, values };
    live.take({ epoch: live.epoch, seq: live.lastSeq + 1, ...frame });
    if (i % 200 === 199) await new Promise((done) => setTimeout(done, 0));
  }
  return live.stats;
}"""


def point(step: int) -> dict[str, Any]:
    values = {name: random.random() for name in NAMES}
    return {
        "rank": 0,
        "seq": step,
        "step": step,
        "tokens": step * 1000,
        "time": time.time(),
        "values": values,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        orrery = Orrery(Path(folder) / "home", devices=1)
        try:
            orrery.start()
            measure(orrery)
        finally:
            orrery.close()


def measure(orrery: Orrery) -> None:
    assert orrery.client is not None
    run = orrery.submit({"kind": "external", "external": {}}, "twelve charts")
    send(orrery, run, 1, 600)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        page = browser.new_page(viewport={"width": 1440, "height": 2600})
        answers: list[Response] = []
        # Playwright cannot wrap a bound method of a list
        page.on("response", lambda answer: answers.append(answer))
        log_in(page, orrery)
        answers.clear()
        started = time.monotonic()
        page.goto(f"{orrery.url}/runs/{run}/")
        page.wait_for_selector(".chart .plot-container, .chart .js-plotly-plot", timeout=30_000)
        record(
            "page",
            what="run page: first chart",
            value=time.monotonic() - started,
            unit="s",
            figure="<= 1.5",
        )
        page.wait_for_timeout(1500)
        weigh(page, answers, orrery)
        shown = page.evaluate(
            "window.orrery.charts.charts.filter((chart) => chart.visible()).length"
        )
        main_thread(page, orrery, run, shown)
        heap(page)
        browser.close()


def weigh(page: Page, answers: list[Response], orrery: Orrery) -> None:
    scripts = [a for a in answers if a.request.resource_type == "script" and a.status == 200]
    weight = sum(len(gzip.compress(answer.body(), 6)) for answer in scripts)
    record(
        "page",
        what="run page: JavaScript, gzip",
        value=weight / 1000,
        unit="kB",
        figure="<= 600",
        files=len(scripts),
    )
    hosts = {urlsplit(answer.url).netloc for answer in answers} - {urlsplit(orrery.url).netloc, ""}
    record(
        "page", what="run page: other hosts asked", value=len(hosts), unit="hosts", figure="== 0"
    )
    html = next(a for a in answers if a.request.resource_type == "document")
    record("page", what="run page: HTML", value=len(html.body()) / 1000, unit="kB", figure="<= 150")


def main_thread(page: Page, orrery: Orrery, run: str, shown: int) -> None:
    stop = threading.Event()

    def feed() -> None:
        step = 601
        while not stop.wait(0.1):
            send(orrery, run, step, 1)
            step += 1

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        page.wait_for_timeout(3000)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        before, started = task_seconds(session), time.monotonic()
        page.wait_for_timeout(LIVE_S * 1000)
        share = (task_seconds(session) - before) / (time.monotonic() - started)
    finally:
        stop.set()
        feeder.join()
    record(
        "page",
        what="live charts: share of the main thread",
        value=share,
        unit="fraction",
        figure="<= 0.3",
        charts=shown,
    )


def heap(page: Page) -> None:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    replay(page, 2000)  # warm up: curves reach their maximum length
    before = used_bytes(session)
    stats = replay(page, FRAMES)
    after = used_bytes(session)
    growth = after / before - 1
    record(
        "page",
        what="heap growth over 2 hours of frames",
        value=growth,
        unit="fraction",
        figure="<= 0.1",
        before_mb=before / 1e6,
    )
    longest = page.evaluate(
        "Math.max(...[...window.orrery.charts.curves.values()].map((curve) => curve.x.length))"
    )
    record(
        "page",
        what="points a curve holds in the browser",
        value=longest,
        unit="points",
        figure="<= 1500",
        **stats,
    )


def replay(page: Page, count: int) -> dict[str, Any]:
    last = page.evaluate(
        "Math.max(...[...window.orrery.charts.curves.values()].map((curve) => curve.last?.x ?? 0))"
    )
    stats = page.evaluate(REPLAY, [NAMES, 0, count, last + 1])
    page.wait_for_timeout(5000)  # until all refetches have finished
    return dict(stats)


def used_bytes(session: CDPSession) -> float:
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"])


def task_seconds(session: CDPSession) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def send(orrery: Orrery, run: str, first: int, count: int) -> None:
    assert orrery.client is not None
    answer = orrery.client.post(
        f"runs/{run}/points", json={"points": [point(first + i) for i in range(count)]}
    )
    assert answer.status_code in (200, 201, 202), answer.text


if __name__ == "__main__":
    main()
