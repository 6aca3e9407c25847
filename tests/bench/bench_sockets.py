"""Fan-out to 500 sockets of one web process at 10 frames per second: delay, loss, CPU per delivery.

The delay counts from the time before the transaction, which each frame carries. The listeners run
in a process of their own. `[--quick]`
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
    parent, child = multiprocessing.get_context("spawn").Pipe()
    url = f"ws://127.0.0.1:{port}/ws/runs/{run_id}/"
    listener = multiprocessing.get_context("spawn").Process(
        target=_listen, args=(child, url, token, frames)
    )
    listener.start()
    assert parent.recv() == "connected"
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
    received: list[tuple[list[int], list[float]]] = parent.recv()
    after = process.cpu_times()
    listener.join()
    expected = list(range(first, first + frames))
    lost = sum(len(set(expected) - set(seqs)) for seqs, _ in received)
    doubled = sum(len(seqs) - len(set(seqs)) for seqs, _ in received)
    delays = sorted(delay for _, per_socket in received for delay in per_socket)
    cpu = (after.user + after.system - before.user - before.system) / (frames * len(received))
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
    for socket in sockets:
        await socket.recv()  # the first heartbeat: replayed and live
    pipe.send("connected")

    async def read(socket: Any) -> tuple[list[int], list[float]]:
        arrivals = []
        async with asyncio.timeout(frames / RATE_HZ + 30):
            while len(arrivals) < frames:
                text = await socket.recv()
                if '"type":"points"' in text:
                    arrivals.append((time.time(), text))
        parsed = [(now, json.loads(text)) for now, text in arrivals]
        return [frame["seq"] for _, frame in parsed], [now - frame["sent"] for now, frame in parsed]

    received = await asyncio.gather(*(read(socket) for socket in sockets))
    await asyncio.gather(*(socket.close() for socket in sockets))
    return list(received)


if __name__ == "__main__":
    main(sys.argv[1:])
