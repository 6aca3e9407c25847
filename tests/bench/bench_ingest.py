"""Throughput of durable ingest: sealed batches on the stream are verified, stored and committed.

A point is one value of one metric at one step. Eight ranks log 30 metrics; a supervisor's batch
holds what its ranks logged since the last one. `python -m tests.bench.bench_ingest [postgresql]
[--quick]`
"""

from __future__ import annotations

import random
import subprocess
import sys
import time

from tests.bench.record import record
from tests.bench.stack import postgresql_programs, stack

RANKS = 8
METRICS = 30
# what a supervisor sends every 0.2 s of a run with 20 steps/s, and after an outage of 2 and of 12
# seconds
BATCHES = (
    ("batches of 4 steps", 4, 1_200_000),
    ("batches of 40 steps", 40, 3_000_000),
    ("batches of 250 steps", 250, 4_800_000),
)
FIGURES = {"sqlite": ">= 200000", "postgresql": ">= 100000"}


def main(arguments: list[str]) -> None:
    databases = [name for name in FIGURES if name in arguments] or list(FIGURES)
    if len(databases) > 1:  # Django is set up once per process
        for name in databases:
            if name == "sqlite" or postgresql_programs():
                subprocess.run(
                    [sys.executable, "-m", "tests.bench.bench_ingest", name, *arguments], check=True
                )
        return
    with stack(postgres=databases[0] == "postgresql"):
        for label, steps, points in BATCHES:
            measure(databases[0], label, steps, points // (10 if "--quick" in arguments else 1))


def measure(database: str, label: str, steps: int, points: int) -> None:
    from orchestrator.common.redis import client
    from orchestrator.telemetry.ingest import Ingest
    from orchestrator.telemetry.models import Cursor
    from tests import factories
    from workers.contracts.wire import names as wire

    owner = factories.user(f"bench-{steps}")
    node = factories.node(devices=RANKS)
    run = factories.run(owner, devices=RANKS)
    attempt = factories.running(run, node)
    messages = list(_messages(run.id, attempt, node, steps, points))
    total = len(messages) * RANKS * METRICS * steps
    with client().pipeline(transaction=False) as pipe:
        for message in messages:
            pipe.xadd(wire.TELEMETRY, {wire.FIELD_NODE: node.name, wire.FIELD_MESSAGE: message})
        pipe.execute()
    ingest = Ingest()
    ticks: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()
    while client().xlen(wire.TELEMETRY):
        before = time.perf_counter()
        ingest.tick()
        ticks.append(time.perf_counter() - before)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert ingest.decoder.dropped.total() == 0, ingest.decoder.dropped
    done = Cursor.objects.filter(run=run, stream="points").values_list("ranges", flat=True)
    assert set(done) == {f"[[1,{len(messages) * steps}]]"}, "points are missing"
    record(
        "ingest",
        what=f"ingest, durable, {database}, {label}",
        value=total / seconds,
        unit="points/s",
        figure=FIGURES[database],
        cpu_us_per_point=round(cpu / total * 1e6, 2),
        longest_tick_s=round(max(ticks), 3),
        ranks=RANKS,
        metrics=METRICS,
    )


def _messages(run_id: int, attempt: object, node: object, steps: int, points: int) -> object:
    """Sealed envelopes of one supervisor; each holds batches of all its ranks."""
    from orchestrator.fleet.selectors import node_secret
    from workers.contracts.wire import names as wire
    from workers.contracts.wire.envelope import seal

    secret, draw = node_secret(node), random.Random(0)  # type: ignore[arg-type]
    names = [
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "mfu",
        "step_time_s",
        *(f"m/{i}" for i in range(METRICS - 6)),
    ]
    for first in range(1, points // (RANKS * METRICS) + 1, steps):
        seq = list(range(first, first + steps))
        batches = []
        for rank in range(RANKS):
            batch = {
                "v": 1,
                "run": str(run_id),
                "attempt": 1,
                "rank": rank,
                "seq": seq,
                "step": seq,
                "tokens": [number * 4096 for number in seq],
                "time": [1.79e9 + number * 0.05 for number in seq],
                "values": {name: [draw.random() for _ in seq] for name in names},
            }
            batches.append({"stream": "points", "rank": rank, "batch": batch})
        body = {
            "run": str(run_id),
            "attempt": 1,
            "attempt_id": str(attempt.id),
            "fence": str(attempt.fence),
        }  # type: ignore[attr-defined]
        sealed = seal(
            secret,
            wire.KIND_TELEMETRY,
            {**body, "batches": batches},
            ttl_s=3600,
            now=time.time(),
            node=node.name,  # type: ignore[attr-defined]
        )
        yield sealed


if __name__ == "__main__":
    main(sys.argv[1:])
