"""CPU time of heartbeats: 1,000 nodes with 8 busy devices each, every 5 s, on PostgreSQL.

Counts this process and the database's server. `--small` uses 100 nodes.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import psutil

from tests.bench.bench_tick import fill, one_pass
from tests.bench.record import record
from tests.bench.stack import stack

EVERY_S = 5  # a node's interval; the scheduler polls once per second
ROUNDS = 6  # intervals that are measured, after one that is not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    args, _ = parser.parse_known_args()
    with stack(postgres=True):
        measure(100 if args.small else 1000)


def measure(count: int) -> None:
    """Start one attempt per node and apply the heartbeats of `ROUNDS` intervals."""
    from django.db import connection

    from orchestrator.common.processes.garbage_collection import exclude_loaded_objects
    from orchestrator.scheduling.loop import Watched
    from orchestrator.scheduling.periodic_checks import reap
    from tests import factories

    owner = factories.user("bench")
    fill(owner, count, count)
    placed = 0
    while placed < count:
        placed += one_pass()[1]
    beats = sealed(count)
    watched = Watched()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        server = psutil.Process(cursor.fetchone()[0])
    exclude_loaded_objects()  # as the scheduler's process does
    beat(beats, watched)
    spent = 0.0
    for _ in range(ROUNDS):
        spent += beat(beats, watched, server)
    more: dict[str, Any] = {"nodes": count, "devices": 8 * count, "database": "postgresql"}
    each = spent / ROUNDS / count * 1000
    record("heartbeats", what="CPU per heartbeat", value=each, unit="ms", figure="<= 0.3", **more)
    share = spent / ROUNDS / EVERY_S
    name = f"heartbeats of {count:,} nodes every {EVERY_S} s"
    record("heartbeats", what=name, value=share, unit="of a core", figure="<= 0.2", **more)
    before = cpu_s(server)
    reap()
    name = f"a pass of the periodic checks over {count:,} attempts: CPU"
    record("heartbeats", what=name, value=cpu_s(server) - before, unit="s", **more)


def sealed(count: int) -> list[tuple[str, Any]]:
    """`(node, function that makes a new heartbeat)` for each node with its attempt."""
    from orchestrator.fleet.selectors import node_secret
    from orchestrator.runs.models import Attempt
    from tests import factories
    from workers.contracts.wire.node_messages import AttemptSeen, DeviceSample

    nodes = {node.name: node for node in factories.Node.objects.all()}
    beats = []
    for attempt in Attempt.objects.order_by("pk")[:count]:
        node = nodes[attempt.placement[0]["node"]]
        samples = [
            DeviceSample(
                index=index,
                utilization=0.93,
                memory_used_bytes=70 * 2**30,
                memory_total_bytes=80 * 2**30,
                temperature_c=61.0,
                power_w=645.0,
            )
            for index in range(8)
        ]
        seen = [AttemptSeen(fence=str(attempt.fence), state="running")]

        beats.append((node.name, partial(envelope_text, node, node_secret(node), samples, seen)))
    return beats


def envelope_text(node: Any, secret: bytes, samples: list[Any], seen: list[Any]) -> str:
    """A new heartbeat of the node, sealed."""
    from workers.contracts.wire import envelope, names
    from workers.contracts.wire.node_messages import Heartbeat

    now = time.time()
    body = Heartbeat(node=node.name, time=now, samples=samples, attempts=seen).to_dict()
    return envelope.seal(secret, names.KIND_HEARTBEAT, body, ttl_s=60, now=now, node=node.name)


def beat(beats: list[tuple[str, Any]], watched: Any, server: psutil.Process | None = None) -> float:
    """All nodes send once, evenly over the interval; CPU seconds of the scheduler's polls.

    An interval is as long as what the scheduler watches may be old.
    """
    from orchestrator.common.redis import client
    from orchestrator.scheduling.reports import heartbeat_handler
    from orchestrator.scheduling.reports.silence import liveness
    from workers.contracts.wire import liveness as wire

    spent = 0.0
    watched.changed()
    for second in range(EVERY_S):
        with client().pipeline(transaction=False) as pipe:
            for name, make in beats[second::EVERY_S]:
                fields = {wire.FIELD_BEAT: make()}
                pipe.xadd(wire.heartbeat_key(name), fields, maxlen=1, approximate=False)
            pipe.execute()
        before = cpu_s(server)
        watched.refresh()
        new = liveness.poll(client(), watched.nodes, watched.fences)
        assert len(new) == len(beats[second::EVERY_S])
        heartbeat_handler.apply(new, broker_ahead_s=liveness.broker_ahead_s)
        spent += cpu_s(server) - before
    return spent


def cpu_s(server: psutil.Process | None) -> float:
    """CPU seconds of this process and of its database session."""
    times = server.cpu_times() if server is not None else None
    return time.process_time() + (times.user + times.system if times is not None else 0.0)


if __name__ == "__main__":
    main()
