"""A node that is lost, then a broker that is down for 10 minutes, under 8 attempts of real agents.

Times are the product's defaults; only ranks are fake (`tests/chaos`). Needs PostgreSQL. `--short`
shortens the outage to 60 s.
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
from tests.bench.stack import postgresql

NODES, DEVICES = 4, 2
STEP_S = 0.5
POINTS_BEFORE = 20  # per run, before a fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--broker-only", action="store_true", help="without the lost node")
    options, _ = parser.parse_known_args()
    outage_s = 60.0 if options.short else 600.0
    with tempfile.TemporaryDirectory(prefix="orrery-bench-") as folder, postgresql() as url:
        measure(Path(folder), url, outage_s, with_node=not options.broker_only)


def measure(folder: Path, url: str, outage_s: float, *, with_node: bool) -> None:
    from tests.chaos.cluster import Cluster

    cluster = Cluster(
        folder,
        nodes=NODES,
        devices=DEVICES,
        times={"DATABASE_URL": url},
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
        stop_broker(cluster, workload, outage_s)
    finally:
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


def stop_broker(cluster: Any, workload: Any, outage_s: float) -> None:
    """The broker is down under 8 running attempts; half of the runs end meanwhile."""
    from orchestrator.runs.models import Attempt, Run
    from tests.chaos.invariants import complete_series, every_point_once, read_journal, started_once

    ends_later = int(outage_s / STEP_S) + 120
    runs = workload.submit(4, steps=ends_later // 2) + workload.submit(4, steps=ends_later)
    for run in runs:
        running(run)
    before = Attempt.objects.filter(run__in=runs).count()
    started = time.monotonic()
    cluster.broker.kill()
    # ranks write on: those of the first four runs finish meanwhile
    time.sleep(outage_s)
    ended = Attempt.objects.filter(run__in=runs, state="exited").count()
    cluster.broker.start()
    down_s = time.monotonic() - started
    keys = [run.pk for run in runs]
    since(started, lambda: Run.objects.filter(pk__in=keys, state="finished").count() == len(keys))
    workload.wait_for_telemetry_in(cluster.nodes_home, 120.0)
    attempts = Attempt.objects.filter(run__in=runs).count()
    lost = [*complete_series(), *every_point_once(cluster.nodes_home)]
    lost += started_once(read_journal(cluster.journal))
    for problem in lost:
        print(problem)
    for attempt in Attempt.objects.filter(run__in=runs).exclude(exit_class="ok"):
        print(f"attempt {attempt}: {attempt.exit_class}, {attempt.exit}, ended {attempt.ended}")
    name = f"broker down for {outage_s:.0f} s under 8 attempts"
    more = {"down_s": round(down_s, 1), "attempts": attempts}
    record("outage", what=f"{name}: attempts ended by it", value=ended, unit="", figure="== 0")
    extra = attempts - before
    record(
        "outage",
        what=f"{name}: attempts started again",
        value=extra,
        unit="",
        figure="== 0",
        **more,
    )
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
