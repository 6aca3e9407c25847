"""REST at 200 requests per second in an open loop over 100,000 runs; the web under a full queue.

An open loop sends at fixed times whether or not earlier answers have come, and counts latency from
the planned time. Needs PostgreSQL. `--small`: 10,000 runs, 10 s, a fleet of 100 nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import time
from typing import Any

import psutil

from tests.bench.bench_lists import fill as fill_runs
from tests.bench.bench_tick import fill as fill_fleet
from tests.bench.record import record
from tests.bench.stack import manage, stack, wait_for, web
from tests.flows.embedded import free_port

RATE = 200.0
SECONDS = 60.0
PAGE_RATE = 10.0
CLIENTS = 20
IDLE_S = 4.0  # a connection without request
MIB = 2**20
# weight, path; {id}: a run of 100,000
REQUESTS = [
    (20, "/api/v1/runs"),
    (10, "/api/v1/runs?state=failed"),
    (10, "/api/v1/runs?tag=t7"),
    (30, "/api/v1/runs/{id}"),
    (10, "/api/v1/runs/{id}/attempts"),
    (10, "/api/v1/runs/{id}/events"),
    (10, "/api/v1/runs/{id}/series?name=loss"),
    (10, "/api/v1/nodes"),
    (10, "/api/v1/queue"),
    (5, "/api/v1/experiments"),
    (5, "/api/v1/events"),
    (10, "POST points"),
]
PAGES = ["/", "/queue/", "/fleet/", "/runs/", "/health/", "/pulse/"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--processes", type=int, default=1, help="web processes")
    args, _ = parser.parse_known_args()
    with stack(postgres=True):
        port = free_port()
        server = web(port, args.processes)
        try:
            wait_for(port)
            measure(port, psutil.Process(server.pid), small=args.small)
        finally:
            server.terminate()
            server.wait()


def measure(port: int, server: psutil.Process, *, small: bool) -> None:
    """Both parts, against the web process at the port."""
    from orchestrator.accounts import services as accounts
    from orchestrator.accounts.roles import Role
    from tests import factories
    from tests.bench import bench_lists

    if small:
        bench_lists.RUNS = 10_000
    owner = factories.user("bench", Role.ADMIN)
    fill_runs(owner)
    external = factories.external_run(owner)
    heads = []
    for number in range(CLIENTS):  # each below the limit of requests per minute
        user = factories.user(f"bench-{number}", Role.ADMIN)
        _, token = accounts.token_create(user=user, name="bench", by=user)
        heads.append({"Authorization": f"Bearer {token}"})
    paths = planned(bench_lists.RUNS, external.pk)
    asyncio.run(send_at_rate(port, paths[:100], RATE / 4, heads))  # imports and caches
    seconds = 10.0 if small else SECONDS
    begun, cpu = time.monotonic(), cpu_s(server)
    answers = asyncio.run(send_at_rate(port, paths[: int(RATE * seconds)], RATE, heads))
    share = (cpu_s(server) - cpu) / (time.monotonic() - begun)
    processes = len(serving(server))
    more: dict[str, Any] = {"processes": processes, "load": round(os.getloadavg()[0], 1)}
    more |= {"runs": bench_lists.RUNS, "seconds": seconds, "web_cores": round(share, 2)}
    report(paths, answers)
    latencies = sorted(latency for _, latency in answers)
    p99 = statistics.quantiles(latencies, n=100)[-1] * 1000
    errors = sum(status >= 400 or status == 0 for status, _ in answers)
    name = f"{RATE:.0f} requests/s, open loop"
    p50 = round(statistics.median(latencies) * 1000, 1)
    record("load", what=f"{name}: p99", value=p99, unit="ms", figure="<= 250", p50_ms=p50, **more)
    record("load", what=f"{name}: errors", value=errors, unit="", figure="== 0", **more)
    many = {"points": [point(1, {f"m/{number}": 1.0 for number in range(100_000)})]}
    body = json.dumps(many)
    path = f"POST /api/v1/runs/{external.pk}/points {body}"
    [(status, latency)] = asyncio.run(send_at_rate(port, [path], 1.0, heads))
    assert status == 422, status
    record("load", what="100,000 names: 422 after", value=latency, unit="s", figure="<= 1")
    under_full_queue(port, server, owner, small=small)


def serving(server: psutil.Process) -> list[psutil.Process]:
    """The web processes: those of a parent that shares a port, else the server itself."""
    workers = [one for one in server.children() if "spawn_main" in " ".join(one.cmdline())]
    return workers or [server]


def cpu_s(server: psutil.Process) -> float:
    """CPU time of all web processes so far."""
    return sum(sum(one.cpu_times()[:2]) for one in serving(server))


def report(paths: list[str], answers: list[tuple[int, float]]) -> None:
    """Print the median and the 99th percentile of each route."""
    routes: dict[str, list[tuple[int, float]]] = {}
    for path, answer in zip(paths, answers, strict=False):
        routes.setdefault(re.sub(r"/\d+", "/{id}", path.partition(" {")[0]), []).append(answer)
    for route, group in sorted(routes.items()):
        seconds = sorted(latency for _, latency in group)
        states = sorted({status for status, _ in group})
        print(
            f"  {route}: {len(group)} requests, median {statistics.median(seconds) * 1000:.0f} ms, "
            f"p99 {seconds[int(0.99 * (len(seconds) - 1))] * 1000:.0f} ms, status {states}"
        )


def under_full_queue(port: int, server: psutil.Process, owner: Any, *, small: bool) -> None:
    """Pages while a scheduler starts a gang on each of 1,000 nodes, with 10,000 waiting."""

    from orchestrator.runs.models import Attempt
    from tests import factories

    nodes = 100 if small else 1000
    fill_fleet(owner, nodes, 10 * nodes)
    cookie = factories.client_for(owner).cookies["sessionid"].value
    scheduler = manage("scheduler")
    try:
        watched = psutil.Process(scheduler.pid)
        deadline = time.monotonic() + 60
        health: list[tuple[int, float]] = []
        while not health or health[-1][0] != 200:  # 503 until the scheduler's first pass
            assert time.monotonic() < deadline, health
            health = asyncio.run(send_at_rate(port, ["/health/"], 2.0, [{}]))
        started = time.monotonic()
        heads, pages = [{"Cookie": f"sessionid={cookie}"}], PAGES * 20

        def placed() -> bool:
            done = Attempt.objects.filter(dispatched__isnull=False).count() >= nodes
            return done or time.monotonic() - started > 120

        answers = asyncio.run(send_at_rate(port, pages, PAGE_RATE, heads, until=placed))
        assert Attempt.objects.filter(dispatched__isnull=False).count() >= nodes
        report(pages * 100, answers)
        after = asyncio.run(send_at_rate(port, pages, PAGE_RATE, heads))
        report(pages, after)
        answers += after
        assert all(status == 200 for status, _ in answers), [s for s, _ in answers if s != 200]
        p95 = statistics.quantiles([latency for _, latency in answers], n=20)[-1] * 1000
        more = {"nodes": nodes, "waiting": 9 * nodes, "requests": len(answers)}
        name = "pages while a full queue is placed: p95"
        record("load", what=name, value=p95, unit="ms", figure="<= 150", **more)
        first, last = (
            Attempt.objects.exclude(dispatched=None)
            .order_by(order)
            .values_list("dispatched", flat=True)[0]
            for order in ("dispatched", "-dispatched")
        )
        rate = nodes / max(0.001, (last - first).total_seconds())
        name = "gang placements through dispatch, while pages are read"
        record("load", what=name, value=rate, unit="per s", figure=">= 300", **more)
        web_bytes = sum(one.memory_info().rss for one in serving(server))
        memory = (web_bytes + watched.memory_info().rss) / MIB
        name = "web and scheduler: resident memory"
        record("load", what=name, value=memory, unit="MiB", figure="<= 1536", **more)
    finally:
        scheduler.terminate()
        scheduler.wait()


def planned(runs: int, external: int) -> list[str]:
    """The requests of the longest measurement, in a fixed order."""
    import random

    chance = random.Random(1)
    weights = [weight for weight, _ in REQUESTS]
    paths = []
    for number in range(int(RATE * SECONDS)):
        path = chance.choices(REQUESTS, weights)[0][1].format(id=chance.randint(1, runs))
        if path == "POST points":
            values = {"loss": 1.0, "lr": 0.1}
            body = json.dumps({"points": [point(number + 1, values)]})
            path = f"POST /api/v1/runs/{external}/points {body}"
        paths.append(path)
    return paths


def point(seq: int, values: dict[str, float]) -> dict[str, Any]:
    """A point of a REST request."""
    return {"seq": seq, "step": seq, "time": time.time(), "values": values}


async def send_at_rate(
    port: int, paths: list[str], rate: float, heads: list[dict[str, str]], *, until: Any = None
) -> list[tuple[int, float]]:
    """`(status, seconds since the planned time)` of each; status 0: no answer within 30 s."""
    connections: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
    started, tasks = time.monotonic(), []
    number = 0
    while number < len(paths) if until is None else not await asyncio.to_thread(until):
        at = started + number / rate
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        path, head = paths[number % len(paths)], heads[number % len(heads)]
        tasks.append(asyncio.create_task(_send(port, path, head, at, connections)))
        number += 1
    answers = list(await asyncio.gather(*tasks))
    while not connections.empty():
        connections.get_nowait()[2].close()
    return answers


async def _connection(port: int, connections: asyncio.LifoQueue[Any]) -> tuple[Any, Any]:
    """A connection that the server keeps open (it closes those that are idle for 5 s), or a new."""
    while not connections.empty():
        used, reader, writer = connections.get_nowait()
        if time.monotonic() - used < IDLE_S and not reader.at_eof():
            return reader, writer
        writer.close()
    return await asyncio.open_connection("127.0.0.1", port)


async def _send(
    port: int, path: str, head: dict[str, str], at: float, connections: asyncio.LifoQueue[Any]
) -> tuple[int, float]:
    method, path, body = path.split(" ", 2) if path.startswith("POST ") else ("GET", path, "")
    lines = [f"{method} {path.replace(' ', '%20')} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in head.items()]
    data = body.encode()
    if data:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    try:
        async with asyncio.timeout(30):
            reader, writer = await _connection(port, connections)
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
            await reader.readexactly(length)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return 0, time.monotonic() - at
    connections.put_nowait((time.monotonic(), reader, writer))
    return int(answer.split(" ", 2)[1]), time.monotonic() - at


if __name__ == "__main__":
    main()
