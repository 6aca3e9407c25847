"""Latency from a rank's recorder to a page's socket, and what a page has after interruptions.

The path is files, supervisor, Redis, ingest, database and web process. The interruptions are a
killed web process and a closed connection. `[--quick]`
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from tests.bench.rank import Page, Rank
from tests.bench.record import record
from tests.bench.stack import free_port, manage, stack, wait_for, web

RATE_HZ = 20.0


def main(arguments: list[str]) -> None:
    quick = "--quick" in arguments
    with stack():
        rank, port = Rank(Path(os.environ["ORRERY_HOME"]), RATE_HZ), free_port()
        ingest, server = manage("ingest"), web(port)
        try:
            wait_for(port)
            time.sleep(3)  # until both have started
            with rank.logging():
                asyncio.run(measure(rank, port, server, 10 if quick else 40, 5 if quick else 60))
        finally:
            for process in (ingest, server):
                process.terminate()
                process.wait(20)


async def measure(rank: Rank, port: int, server: object, calm_s: float, cut_s: float) -> None:
    from orchestrator.accounts import services as accounts
    from orchestrator.common import live

    _, token = await asyncio.to_thread(
        lambda: accounts.token_create(user=rank.owner, name="b", by=rank.owner)
    )
    url, topic = f"ws://127.0.0.1:{port}/ws/runs/{rank.run.pk}/", f"run:{rank.run.pk}"
    stop = asyncio.Event()

    def head() -> int:
        from django.db import connection

        try:
            return live.head(topic).seq
        finally:
            connection.close()

    page, cut_page, end = Page(url, token), Page(url, token), asyncio.Event()
    watching = asyncio.create_task(page.watch(stop, head))
    cut = asyncio.create_task(cut_page.watch(end, head))
    await asyncio.sleep(calm_s)
    delays = sorted(
        arrived - logged for step, logged, arrived in page.arrivals if step > RATE_HZ * 2
    )
    what = f"recorder to socket, {RATE_HZ:.0f} steps/s of 30 values"
    record(
        "latency",
        what=f"{what}, p50",
        value=statistics.median(delays) * 1e3,
        unit="ms",
        figure="<= 300",
    )
    record(
        "latency",
        what=f"{what}, p99",
        value=delays[int(len(delays) * 0.99)] * 1e3,
        unit="ms",
        figure="<= 1000",
    )

    end.set()  # disconnects this page for a while
    await cut
    pid: int = server.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    server.wait()  # type: ignore[attr-defined]
    again = web(port)
    try:
        await asyncio.sleep(cut_s)
        end.clear()
        cut = asyncio.create_task(cut_page.watch(end, head))
        await asyncio.sleep(5)
        for label, client in (
            ("kill -9 of the web process", page),
            (f"a cut of {cut_s:.0f} s", cut_page),
        ):
            steps = [step for step, _, _ in client.arrivals]
            missing = len(set(range(1, max(steps) + 1)) - set(steps))
            record(
                "latency",
                what=f"after {label}, steps missing",
                value=missing,
                unit="steps",
                figure="== 0",
            )
            doubled = len(steps) - len(set(steps))
            record(
                "latency",
                what=f"after {label}, steps doubled",
                value=doubled,
                unit="steps",
                figure="== 0",
            )
            caught = client.caught_up_s[-1]
            record(
                "latency",
                what=f"after {label}, caught up",
                value=caught,
                unit="s",
                figure="<= 1",
                gaps=client.gaps,
            )
        stop.set()
        end.set()
        await asyncio.gather(watching, cut)
    finally:
        again.terminate()
        again.wait(20)


if __name__ == "__main__":
    main(sys.argv[1:])
