"""A node that is lost, then parts that are down for 10 minutes, under 8 attempts of real agents.

Times are the product's defaults; only ranks are fake (`tests/chaos`). Needs PostgreSQL.
`ARGS="outage"` stops the broker; `--parts broker database scheduler ingest web agents all` selects
what is stopped, one after another. `web` has clients: the recorder, `orrery watch`, a page and a
socket. `--short` shortens each outage to 60 s.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.bench.record import record
from tests.bench.stack import PostgresServer

NODES, DEVICES = 4, 2
STEP_S = 0.5
POINTS_BEFORE = 20  # per run, before a fault
PARTS = ("broker", "database", "scheduler", "ingest", "web", "agents", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["broker"])
    parser.add_argument("--without-lost-node", action="store_true")
    options, _ = parser.parse_known_args()
    outage_s = 60.0 if options.short else 600.0
    database = PostgresServer()
    try:
        database.start()
        with tempfile.TemporaryDirectory(prefix="orrery-bench-") as folder:
            measure(
                Path(folder),
                database,
                outage_s,
                parts=options.parts,
                with_node=not options.without_lost_node,
            )
    finally:
        database.stop()
        database.remove()


def measure(
    folder: Path, database: PostgresServer, outage_s: float, *, parts: list[str], with_node: bool
) -> None:
    from tests.chaos.cluster import Cluster

    cluster = Cluster(
        folder,
        nodes=NODES,
        devices=DEVICES,
        times={"DATABASE_URL": database.url},
        step_s=STEP_S,
        disks=False,
    )
    os.environ.update({**cluster.environ, "DJANGO_SETTINGS_MODULE": "orchestrator.config.settings"})
    import django

    django.setup()
    import random

    from tests.chaos.workload import Workload

    workload = Workload(random.Random(1), devices=NODES * DEVICES, steps=1)
    try:
        cluster.start(workload.join_token)
        workload.wait_for_nodes(NODES)
        if with_node:
            lose_node(cluster, workload)
        for part in parts:
            stop_part(cluster, database, workload, part, outage_s)
    finally:
        from django.db import connections

        connections.close_all()
        cluster.close()


def lose_node(cluster: Any, workload: Any) -> None:
    """A node disappears at once: until it is shown, and until its run has another attempt."""
    from orchestrator.fleet.models import Node
    from orchestrator.runs.models import Run

    [run] = workload.submit(1, steps=400)
    running(run)
    [share] = Run.objects.get(pk=run.pk).attempts.get().placement
    node = next(node for node in cluster.agents if node.name == share["node"])
    began = time.monotonic()
    node.agent.kill()
    node.proxy.refuse()
    for process in list(cluster.processes()):
        with suppress(psutil.Error):
            if process.environ().get("ORRERY_NODE") == node.name:
                process.kill()
    after = since(began, lambda: not Node.objects.filter(name=node.name, health="up").exists())
    record("outage", what="node lost: shown", value=after, unit="s", figure="<= 20")
    after = since(began, lambda: run.attempts.filter(exit_class="lost").exists())
    record("outage", what="node lost: its run waits again", value=after, unit="s", figure="<= 40")
    running(run)
    second = run.attempts.get(number=2)
    record(
        "outage",
        what="node lost: its run runs elsewhere",
        value=time.monotonic() - began,
        unit="s",
        resumed_at_step=(second.resume_from or {}).get("step", 0),
    )
    node.proxy.accept()
    node.agent.start()
    since(began, lambda: Node.objects.filter(name=node.name, health="up").exists())
    since(began, lambda: Run.objects.filter(pk=run.pk, state="finished").exists())


def stopped_parts(cluster: Any, database: PostgresServer, web: Any, part: str) -> list[Any]:
    """What goes down: objects with `start`, and `kill` or `stop`."""
    agents = [node.agent for node in cluster.agents]
    every = {
        "broker": [cluster.broker],
        "database": [database],
        "scheduler": [cluster.scheduler],
        "ingest": [cluster.ingest],
        "web": [web],
        "agents": agents,
    }
    return every[part] if part in every else [one for some in every.values() for one in some]


def stop_part(
    cluster: Any, database: PostgresServer, workload: Any, part: str, outage_s: float
) -> None:
    """The part is down under 8 running attempts; half of the runs end meanwhile."""
    from django.db import connections

    from orchestrator.runs.models import Attempt, Run
    from tests.bench.web_clients import WebClients
    from tests.chaos.invariants import complete_series, every_point_once, read_journal, started_once

    ends_later = int(outage_s / STEP_S) + 120
    runs = workload.submit(4, steps=ends_later // 2) + workload.submit(4, steps=ends_later)
    for run in runs:
        running(run)
    keys = [run.pk for run in runs]
    before = Attempt.objects.filter(run__in=keys).count()
    clients = WebClients(cluster)
    if part in ("web", "all"):
        clients.open(keys[-1], outage_s)
    connections.close_all()
    started, down = time.monotonic(), stopped_parts(cluster, database, clients.web, part)
    for one in down:
        one.stop() if isinstance(one, PostgresServer) else one.kill()
    # ranks write on: those of the first four runs finish meanwhile
    time.sleep(outage_s)
    for one in sorted(down, key=lambda one: not isinstance(one, PostgresServer)):
        one.start()
    down_s = time.monotonic() - started
    since(started, lambda: Run.objects.filter(pk__in=keys, state="finished").count() == len(keys))
    workload.wait_for_telemetry_in(cluster.nodes_home, 120.0)
    tries = Attempt.objects.filter(run__in=keys)
    broken = tries.exclude(exit_class="ok")
    lost = [*complete_series(), *every_point_once(cluster.nodes_home)]
    lost += started_once(read_journal(cluster.journal))
    failed = clients.check() if part in ("web", "all") else []
    clients.close()
    for problem in failed:
        print(problem)
    for problem in lost:
        print(problem)
    for attempt in broken:
        print(f"attempt {attempt}: {attempt.exit_class}, {attempt.exit}, ended {attempt.ended}")
    down_name = {"agents": "all agents", "all": "all of these parts"}.get(part, part)
    name = f"{down_name} down for {outage_s:.0f} s under 8 attempts"
    more = {"down_s": round(down_s, 1), "attempts": tries.count()}
    record(
        "outage", what=f"{name}: attempts ended by it", value=broken.count(), unit="", figure="== 0"
    )
    record(
        "outage",
        what=f"{name}: attempts started again",
        value=tries.count() - before,
        unit="",
        figure="== 0",
        **more,
    )
    if part in ("web", "all"):
        what = f"{name}: clients that did not continue (recorder, watch, page, socket)"
        record("outage", what=what, value=len(failed), unit="", figure="== 0")
    record(
        "outage",
        what=f"{name}: ranks with lost or doubled points",
        value=len(lost),
        unit="",
        figure="== 0",
        points=sum(int(run.spec["train"]["steps"]) for run in runs),
    )


def running(run: Any) -> None:
    """Wait until the run's newest attempt has stored some points."""
    from orchestrator.runs.models import Run

    def steps() -> bool:
        row = Run.objects.get(pk=run.pk)
        return row.state == "running" and (row.summary or {}).get("step", 0) >= POINTS_BEFORE

    since(time.monotonic(), steps)


def since(began: float, condition: Callable[[], bool]) -> float:
    """Seconds from `began` until the condition holds."""
    while not condition():
        if time.monotonic() - began > 1800:
            raise TimeoutError("not within 1800 s")
        time.sleep(0.1)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
