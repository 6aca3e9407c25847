"""Fan-out: 500 sockets on one web process, 10 frames a second. Delay from commit to arrival, loss,
CPU a delivery.

The listeners run in a process of their own; frames carry the time before their transaction.
`[--quick]`
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

import psutil

from tests.bench.record import record
from tests.bench.stack import free_port, stack, wait_for, web

SOCKETS = 500
RATE_HZ = 10
SECONDS = 30


def main(arguments: list[str]) -> None:
    seconds = 5 if "--quick" in arguments else SECONDS
    with stack():
        from orchestrator.accounts import services as accounts
        from tests import factories

        owner = factories.user("bench")
        _, token = accounts.token_create(user=owner, name="bench", by=owner)
        run = factories.external_run(owner)
        port = free_port()
        server = web(port)
        try:
            wait_for(port)
            measure(run.id, port, token, server.pid, seconds)
        finally:
            server.terminate()
            server.wait(20)


def measure(run_id: int, port: int, token: str, pid: int, seconds: int) -> None:
    from django.db import transaction

    from orchestrator.common import live

    frames = seconds * RATE_HZ
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    url = f"ws://127.0.0.1:{port}/ws/runs/{run_id}/"
    listener = multiprocessing.get_context("spawn").Process(
        target=_listen, args=(theirs, url, token, frames)
    )
    listener.start()
    assert ours.recv() == "connected"
    process = psutil.Process(pid)
    before = process.cpu_times()
    first = live.head(f"run:{run_id}").seq + 1
    start = time.time()
    # a frame of 330 bytes
    values: dict[str, Any] = {f"metric/{i}": [[1, 0.123456789]] for i in range(8)}
    for i in range(frames):
        time.sleep(max(0.0, start + i / RATE_HZ - time.time()))
        with transaction.atomic():
            live.append(
                f"run:{run_id}", "points", {"sent": time.time(), "rank": 0, "values": values}
            )
    seen: list[tuple[list[int], list[float]]] = ours.recv()
    after = process.cpu_times()
    listener.join()
    wanted = list(range(first, first + frames))
    lost = sum(len(set(wanted) - set(seqs)) for seqs, _ in seen)
    doubled = sum(len(seqs) - len(set(seqs)) for seqs, _ in seen)
    delays = sorted(delay for _, many in seen for delay in many)
    cpu = (after.user + after.system - before.user - before.system) / (frames * len(seen))
    name = f"{SOCKETS} sockets x {RATE_HZ} Hz"
    memory = process.memory_info().rss
    record("sockets", what=f"{name}, delay p50", value=statistics.median(delays) * 1e3, unit="ms")
    record(
        "sockets",
        what=f"{name}, delay p99",
        value=delays[int(len(delays) * 0.99)] * 1e3,
        unit="ms",
        figure="<= 50",
    )
    record("sockets", what=f"{name}, lost frames", value=lost, unit="frames", figure="== 0")
    record("sockets", what=f"{name}, doubled frames", value=doubled, unit="frames", figure="== 0")
    record(
        "sockets",
        what=f"{name}, CPU a delivery",
        value=cpu * 1e6,
        unit="µs",
        figure="<= 50",
        rss_bytes=memory,
    )


def _listen(pipe: Any, url: str, token: str, frames: int) -> None:
    pipe.send(asyncio.run(_collect(pipe, url, token, frames)))


async def _collect(
    pipe: Any, url: str, token: str, frames: int
) -> list[tuple[list[int], list[float]]]:
    from websockets.asyncio.client import connect

    headers = {"Authorization": f"Bearer {token}"}
    options: dict[str, Any] = {"compression": None, "max_queue": None, "ping_interval": None}
    sockets = [await connect(url, additional_headers=headers, **options) for _ in range(SOCKETS)]
    for one in sockets:
        await one.recv()  # the first heartbeat: replayed and live
    pipe.send("connected")

    async def read(one: Any) -> tuple[list[int], list[float]]:
        got = []
        async with asyncio.timeout(frames / RATE_HZ + 30):
            while len(got) < frames:
                text = await one.recv()
                if '"type":"points"' in text:
                    got.append((time.time(), text))
        read_later = [(now, json.loads(text)) for now, text in got]
        return [frame["seq"] for _, frame in read_later], [
            now - frame["sent"] for now, frame in read_later
        ]

    found = await asyncio.gather(*(read(one) for one in sockets))
    await asyncio.gather(*(one.close() for one in sockets))
    return list(found)


if __name__ == "__main__":
    main(sys.argv[1:])
