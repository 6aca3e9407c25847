"""Waiting times of a new user: `up` to the first loss, submit to first step, point to browser."""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.bench.record import record
from tests.browser.polling import wait_until
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
        steady(page, Path(folder) / "steady")
        browser.close()


def first_loss(page: Page, home: Path) -> None:
    """Runs `manage.py up` with its demo run in an empty home; logs in as soon as it is up."""
    orrery = Orrery(home, environ={"ORRERY_DEMO": "1"})
    try:
        started = time.monotonic()
        orrery.start(client=False)
        log_in(page, orrery)
        page.goto(f"{orrery.url}/runs/1/")
        wait_until(page, HAS_LOSS, timeout_s=120)
        record(
            "flight",
            what="up to first loss in the browser",
            value=time.monotonic() - started,
            unit="s",
            figure="<= 25",
        )
    finally:
        orrery.close()


def steady(page: Page, home: Path) -> None:
    """Waiting times of a user on an installation that is already up."""
    orrery = Orrery(home, devices=2)
    try:
        orrery.start()
        log_in(page, orrery)
        first_steps, launches = [], []
        for turn in range(5):
            started = time.time()
            run = orrery.submit(train_spec(steps=5), f"wait {turn}")
            orrery.until_state(run, "finished")
            first_steps.append(first_time(orrery, run) - started)
            attempt = orrery.get(f"runs/{run}/attempts")["items"][0]
            launched = datetime.fromisoformat(
                attempt["launched"].replace("Z", "+00:00")
            ).timestamp()
            launches.append(launched - started)
        record(
            "flight",
            what="submit to first step, 2 ranks, p50",
            value=statistics.median(first_steps),
            unit="s",
            figure="<= 10",
        )
        record(
            "flight",
            what="submit to supervisor started, p50",
            value=statistics.median(launches),
            unit="s",
            figure="<= 0.5",
        )
        latency(page, orrery)
    finally:
        orrery.close()


def latency(page: Page, orrery: Orrery) -> None:
    """From the time in a rank's point to its arrival in the page, by one clock on one machine."""
    run = orrery.submit(train_spec(steps=4000, every=10_000), "latency")
    page.goto(f"{orrery.url}/runs/{run}/")
    wait_until(page, HAS_LOSS, timeout_s=120)
    page.evaluate(LISTEN)
    page.wait_for_timeout(20_000)
    arrived = {int(step): float(at) for step, at in page.evaluate("window.arrivals")}
    times = orrery.get(f"runs/{run}/series", name="loss", x="time", points=5000)["x"]
    written = dict(zip(orrery.steps(run), times, strict=False))
    arrivals = sorted(at - written[step] for step, at in arrived.items() if step in written)
    assert len(arrivals) > 20, f"only {len(arrivals)} points arrived"
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
