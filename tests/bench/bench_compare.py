"""Compare with 100 runs of 10,000 points: from the click to the drawn curves.

Reports seconds, CPU time of the web process and of the browser's main thread, bytes, and how many
extremes (minimum and maximum of each bucket) the drawn points hold. Needs
Debian's chromium.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import Browser, sync_playwright

from tests.bench.bench_flight import log_in
from tests.bench.bench_page import CHROMIUM, task_seconds
from tests.bench.bench_page_delivery import watch
from tests.bench.record import record
from tests.browser.polling import wait_until
from tests.flows.embedded import Orrery

RUNS = 100
STEPS = 10_000
ROUNDS = 5
BUCKETS = 174  # of a curve with 400 points, an eighth of which are jumps
DRAWN = f"document.querySelector('#curves')?.dataset.drawn >= {RUNS}"
WHAT = f"compare {RUNS} runs of {STEPS:,} points"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        orrery = Orrery(Path(folder) / "home", devices=1)
        try:
            orrery.start()
            curves = {finished_run(orrery, number): number for number in range(RUNS)}
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
                measure(browser, orrery, curves)
                browser.close()
        finally:
            orrery.close()


def values_of(number: int) -> list[float]:
    """A falling curve with noise."""
    source = random.Random(number)
    return [4 / (1 + step / 1000) + source.random() for step in range(1, STEPS + 1)]


def finished_run(orrery: Orrery, number: int) -> str:
    assert orrery.client is not None
    run = orrery.submit({"kind": "external", "external": {}}, f"seed {number}")
    began, values = time.time() - STEPS, values_of(number)
    points = [
        {"rank": 0, "seq": step, "step": step, "time": began + step, "values": {"loss": value}}
        for step, value in enumerate(values, 1)
    ]
    answer = orrery.client.post(f"runs/{run}/points", json={"points": points})
    assert answer.status_code in (200, 201, 202), answer.text
    answer = orrery.client.post(f"runs/{run}/finish", json={"status": "finished"})
    assert answer.status_code == 200, answer.text
    return run


def measure(browser: Browser, orrery: Orrery, curves: dict[str, int]) -> None:
    first = browser.new_context()
    page = first.new_page()
    log_in(page, orrery)
    state: Any = first.storage_state()
    first.close()
    web = psutil.Process(orrery.pid_of("web"))
    rounds = [load(browser, orrery, list(curves), state, web) for _ in range(ROUNDS)]
    for label, key, unit, figure in (
        ("click to drawn, cold cache", "cold_s", "s", ""),
        ("click to drawn", "warm_s", "s", "<= 1.5"),
        ("CPU time of the server", "server_s", "s", ""),
        ("CPU time of the main thread", "thread_s", "s", ""),
        ("bytes of the curves", "kB", "kB", ""),
    ):
        values = [one[key] for one in rounds]
        record(
            "compare",
            what=f"{WHAT}: {label}",
            value=statistics.median(values),
            unit=unit,
            figure=figure,
            rounds=ROUNDS,
            highest=max(values),
        )
    extremes(orrery, curves, state)


def load(
    browser: Browser, orrery: Orrery, runs: list[str], state: Any, web: psutil.Process
) -> dict[str, float]:
    """From the list of runs to Compare, with an empty cache and again with a filled one."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, storage_state=state)
    page = context.new_page()
    session = context.new_cdp_session(page)
    addresses: dict[str, str] = {}
    sizes: dict[str, float] = {}
    session.send("Network.enable")
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    watch(session, addresses, sizes)
    result: dict[str, float] = {}
    for key in ("cold_s", "warm_s"):
        page.goto(f"{orrery.url}/runs/")
        page.evaluate(
            """(url) => document.querySelector("main").prepend(
              Object.assign(document.createElement("a"), { href: url, id: "bench" }))""",
            f"/runs/compare/?runs={','.join(runs)}",
        )
        thread = task_seconds(session)
        server, started = busy(web), time.monotonic()
        page.evaluate("document.getElementById('bench').click()")
        page.wait_for_url("**/compare/**", wait_until="commit")
        wait_until(page, DRAWN, timeout_s=120)
        result[key] = time.monotonic() - started
        result["server_s"] = busy(web) - server
        result["thread_s"] = task_seconds(session) - thread
    result["kB"] = sum(
        sizes.get(key, 0) for key, address in addresses.items() if "compare/curves" in address
    )
    result["kB"] /= 2000
    context.close()
    return result


def busy(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    processes = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def extremes(orrery: Orrery, curves: dict[str, int], state: Any) -> None:
    """The share of buckets whose minimum and maximum the browser gets."""
    cookies = {cookie["name"]: cookie["value"] for cookie in state["cookies"]}
    query = {"runs": ",".join(curves), "name": "loss", "x": "step"}
    answer = httpx.get(
        f"{orrery.url}/runs/compare/curves/", params=query, cookies=cookies, timeout=120
    )
    present = total = 0
    for item in json.loads(answer.text)["items"]:
        values = values_of(curves[str(item["run"])])
        held = {int(x) for x in item["x"]}
        buckets: dict[int, list[int]] = {}
        for at in range(STEPS):
            buckets.setdefault(min(int(at * (BUCKETS / (STEPS - 1))), BUCKETS - 1), []).append(at)
        for part in buckets.values():
            for choose in (min, max):
                present += choose(part, key=values.__getitem__) + 1 in held
                total += 1
    record(
        "compare",
        what=f"{WHAT}: minimum and maximum of each bucket drawn",
        value=present / total,
        unit="fraction",
        figure="== 1",
    )


if __name__ == "__main__":
    main()
