"""CPU time and queries of each request of the mixed load and of each page, in one thread.

Counts this process and its PostgreSQL session, in a state like that of `bench load`: 100,000 ended
runs, 1,000 nodes × 8 that run a gang each, and 9,000 runs that wait. CPU time depends little on
other programs, unlike latency. `--small`: a tenth. `--profile PATH` prints where one path's time
goes.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import random
import time
from collections.abc import Callable
from typing import Any

import psutil

from tests.bench import bench_lists
from tests.bench.bench_load import PAGES, REQUESTS, point
from tests.bench.bench_tick import fill as fill_fleet
from tests.bench.bench_tick import one_pass
from tests.bench.record import record
from tests.bench.stack import stack

ROUNDS = 60
WARM_UP = 10
CLIENTS = 20  # tokens, each below the limit of requests per minute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", help="a path of the mix, with {id}, or of a page")
    args, _ = parser.parse_known_args()
    with stack(postgres=True):
        requests = prepare(10 if args.small else 1)
        if args.profile:
            profile(requests[args.profile])
        else:
            measure(requests, small=args.small)


def prepare(part: int) -> dict[str, Callable[[], Any]]:
    """Fill the database; a function per path that sends one request and returns the response."""
    from django.test import Client

    from orchestrator.accounts import services as accounts
    from orchestrator.accounts.roles import Role
    from tests import factories

    bench_lists.RUNS //= part
    owner = factories.user("bench", Role.ADMIN)
    bench_lists.fill(owner)
    external = factories.external_run(owner)
    nodes = 1000 // part
    fill_fleet(owner, nodes, 10 * nodes)
    placed = 0
    while placed < nodes:
        placed += one_pass()[1]
    for _ in range(20):
        one_pass()
    tokens = []
    for number in range(CLIENTS):
        user = factories.user(f"bench-{number}", Role.ADMIN)
        tokens.append(accounts.token_create(user=user, name="bench", by=user)[1])
    session = Client()
    session.force_login(owner)
    cookie = session.cookies["sessionid"].value
    chance = random.Random(1)
    sent = iter(range(10**9))
    send = sender()

    def api(path: str) -> Any:
        number = next(sent)
        head = {"Authorization": f"Bearer {tokens[number % CLIENTS]}"}
        if path == "POST points":
            body = json.dumps({"points": [point(number + 1, {"loss": 1.0, "lr": 0.1})]})
            return send("POST", f"/api/v1/runs/{external.pk}/points", head, body.encode())
        return send("GET", path.format(id=chance.randint(1, bench_lists.RUNS)), head, b"")

    def page(path: str) -> Any:
        return send("GET", path, {"Cookie": f"sessionid={cookie}"}, b"")

    requests: dict[str, Callable[[], Any]] = {}
    for _weight, path in REQUESTS:
        requests[path] = lambda path=path: api(path)  # type: ignore[misc]
    for path in PAGES:
        requests[path] = lambda path=path: page(path)  # type: ignore[misc]
    return requests


def sender() -> Callable[[str, str, dict[str, str], bytes], Any]:
    """A function that passes a request to the web process's handler."""
    from orchestrator.config.asgi import pages

    def send(method: str, path: str, head: dict[str, str], body: bytes) -> Any:
        path, _, query = path.partition("?")
        head = {"Host": "localhost", **head}
        if body:
            head |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
            "headers": [(key.lower().encode(), text.encode()) for key, text in head.items()],
        }
        return pages._respond(scope, io.BytesIO(body))

    return send


def measure(requests: dict[str, Callable[[], Any]], *, small: bool) -> None:
    """Record the CPU time per request of each path, and of the mix."""
    from django.db import connection

    python, database = {}, {}
    for path, request in requests.items():
        connection.close()  # otherwise it would reach its greatest age within a measurement
        for _ in range(WARM_UP):
            response = request()
            assert response.status_code in (200, 202), (path, response.status_code)
        queries = list[str]()

        def count(execute: Any, sql: str, *rest: Any, queries: list[str] = queries) -> Any:
            queries.append(sql)
            return execute(sql, *rest)

        with connection.execute_wrapper(count):
            response = request()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            server = psutil.Process(cursor.fetchone()[0])
        own, its = time.process_time(), database_s(server)
        for _ in range(ROUNDS):
            request()
        python[path] = (time.process_time() - own) / ROUNDS * 1000
        database[path] = (database_s(server) - its) / ROUNDS * 1000
        what = f"CPU per request: {path}"
        more = {"queries": len(queries), "database_ms": round(database[path], 2), "small": small}
        more["bytes"] = len(response.content)
        record("requests", what=what, value=python[path], unit="ms", digits=2, **more)
        print(f"    {more}", flush=True)
    if len(python) < len({path for _, path in REQUESTS}) + len(PAGES):
        return
    weights = sum(weight for weight, _ in REQUESTS)
    for name, times in (("Python", python), ("database", database)):
        mix = sum(weight * times[path] for weight, path in REQUESTS) / weights
        record("requests", what=f"mixed load: CPU per request, {name}", value=mix, unit="ms")
        pages = sum(times[path] for path in PAGES) / len(PAGES)
        record("requests", what=f"pages: CPU per request, {name}", value=pages, unit="ms")


def database_s(server: psutil.Process) -> float:
    """CPU seconds of the database session so far."""
    times = server.cpu_times()
    return float(times.user + times.system)


def profile(request: Callable[[], Any]) -> None:
    """Print where the time of a request goes."""
    for _ in range(WARM_UP):
        request()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(ROUNDS):
        request()
    profiler.disable()
    stats = pstats.Stats(profiler)
    stats.sort_stats("cumulative").print_stats(70)
    stats.sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
