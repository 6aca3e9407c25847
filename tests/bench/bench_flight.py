"""A newcomer's waiting times: `up` to the first loss in the browser, submit to the first step,
point to the browser.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.bench.record import record
from tests.flows.embedded import Orrery, train_spec

CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
HAS_LOSS = "(window.orrery?.charts?.curves.get('loss')?.x.length ?? 0) > 0"
LISTEN = """() => {
  window.arrivals = [];
  const live = window.orrery.live, before = live.onFrame;
  live.onFrame = (frame) => {
    for (const [step] of frame.values?.loss ?? []) window.arrivals.push([step, Date.now() / 1000]);
    before(frame);
  };
}"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        page = browser.new_page()
        first_loss(page, Path(folder) / "first")
        later(page, Path(folder) / "later")
        browser.close()


def first_loss(page: Page, home: Path) -> None:
    """`manage.py up`, installed, in an empty home, with its demo run; a person logs in as soon as
    it says it is up.
    """
    orrery = Orrery(home, environ={"ORRERY_DEMO": "1"})
    try:
        begun = time.monotonic()
        orrery.start(client=False)
        log_in(page, orrery)
        page.goto(f"{orrery.url}/runs/1/")
        page.wait_for_function(HAS_LOSS, timeout=120_000)
        record(
            "flight",
            what="up to first loss in the browser",
            value=time.monotonic() - begun,
            unit="s",
            figure="<= 25",
        )
    finally:
        orrery.close()


def later(page: Page, home: Path) -> None:
    orrery = Orrery(home, devices=2)
    try:
        orrery.start()
        log_in(page, orrery)
        waits, shares = [], []
        for turn in range(5):
            begun = time.time()
            run = orrery.submit(train_spec(steps=5), f"wait {turn}")
            orrery.until_state(run, "finished")
            waits.append(first_time(orrery, run) - begun)
            attempt = orrery.get(f"runs/{run}/attempts")["items"][0]
            launched = datetime.fromisoformat(
                attempt["launched"].replace("Z", "+00:00")
            ).timestamp()
            shares.append(launched - begun)
        record(
            "flight",
            what="submit to first step, 2 ranks, p50",
            value=statistics.median(waits),
            unit="s",
            figure="<= 10",
        )
        record(
            "flight",
            what="submit to supervisor started, p50",
            value=statistics.median(shares),
            unit="s",
            figure="<= 0.5",
        )
        latency(page, orrery)
    finally:
        orrery.close()


def latency(page: Page, orrery: Orrery) -> None:
    """From the time a rank wrote on its point to its arrival in the page; one clock, as it is one
    machine.
    """
    run = orrery.submit(train_spec(steps=4000, every=10_000), "latency")
    page.goto(f"{orrery.url}/runs/{run}/")
    page.wait_for_function(HAS_LOSS, timeout=120_000)
    page.evaluate(LISTEN)
    page.wait_for_timeout(20_000)
    arrived = {int(step): float(at) for step, at in page.evaluate("window.arrivals")}
    times = orrery.get(f"runs/{run}/series", name="loss", x="time", points=5000)["x"]
    written = dict(zip(orrery.steps(run), times, strict=False))
    arrivals = sorted(at - written[step] for step, at in arrived.items() if step in written)
    assert len(arrivals) > 20, f"only {len(arrivals)} points came"
    figures = (("p50", 0.5, "<= 0.3"), ("p99", 0.99, "<= 1.0"))
    for name, share, figure in figures:
        value = arrivals[min(len(arrivals) - 1, int(share * len(arrivals)))]
        record(
            "flight",
            what=f"recorder to browser, {name}",
            value=value,
            unit="s",
            figure=figure,
            points=len(arrivals),
        )
    assert orrery.client is not None
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled")


def first_time(orrery: Orrery, run: str) -> float:
    return float(orrery.get(f"runs/{run}/series", name="loss", x="time")["x"][0])


def log_in(page: Page, orrery: Orrery) -> None:
    username, password = (orrery.home / "first-login").read_text().split()
    page.goto(f"{orrery.url}/login/")
    page.fill("[name=username]", username)
    page.fill("[name=password]", password)
    page.press("[name=password]", "Enter")
    page.wait_for_url(lambda url: "login" not in url)


if __name__ == "__main__":
    main()
