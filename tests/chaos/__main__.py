"""`python -m tests.chaos --faults N --seed S`: injects faults into a cluster of real processes.

Submits small runs all the time, injects faults by seed, heals, waits for every run, and checks
the invariants. Exits with 1 and lists the violations if one is violated. `make chaos` calls it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 40


def main() -> int:
    """The exit code: 0 if every invariant holds."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2, help="devices per node")
    parser.add_argument("--pace", type=float, default=0.3, help="mean seconds between faults")
    parser.add_argument("--wave", type=int, default=100, help="faults until all faults end")
    parser.add_argument("--calm", type=float, default=12.0, help="seconds between two waves")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="inject no further faults after these"
    )
    parser.add_argument("--settle", type=float, default=180.0, help="seconds until all runs end")
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all files")
    parser.add_argument("--database", type=Path, help="a migrated SQLite file to begin with")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="orrery-chaos-"))
    print(f"chaos: seed {options.seed}, {options.faults} faults, files in {folder}", flush=True)
    violated = inject(options, folder)
    for violation in violated:
        print(f"VIOLATED: {violation}")
    if violated or options.keep:
        print(f"chaos: files are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if violated else 0


def inject(options: argparse.Namespace, folder: Path) -> list[str]:
    """Run the cluster under faults; the violated invariants."""
    from tests.chaos.cluster import Cluster

    chance = random.Random(options.seed)
    skews_s = [0.0, 75.0, -40.0]  # clocks of the nodes
    cluster = Cluster(folder, nodes=options.nodes, devices=options.devices, skews_s=skews_s)
    os.environ.update({**cluster.environ, "DJANGO_SETTINGS_MODULE": "orchestrator.config.settings"})
    if options.database:
        from tests.migrated_database import install

        install(options.database, Path(os.environ["ORRERY_HOME"]))
    import django

    django.setup()
    logging.disable(logging.WARNING)  # this process reaches the broker only between outages
    from tests.chaos.workload import Workload

    workload = Workload(chance, devices=options.nodes * options.devices, steps=STEPS)
    try:
        cluster.start(workload.join_token)
        workload.wait_for_nodes(options.nodes)
        return _run(options, cluster, workload, chance)
    finally:
        cluster.close()


def _run(
    options: argparse.Namespace, cluster: Any, workload: Any, chance: random.Random
) -> list[str]:
    from tests.chaos.faults import Injector
    from tests.chaos.invariants import Evidence, violations

    injector, began = Injector(cluster, chance, options.only), time.monotonic()
    injected, due = 0, time.monotonic() + 2.0
    while injected < options.faults and time.monotonic() - began < options.seconds:
        workload.keep_busy()
        if time.monotonic() >= due:
            name = injector.inject()
            injected += bool(name)
            due = time.monotonic() + chance.expovariate(1.0 / options.pace)
            if injected % options.wave == 0 and name:
                print(f"chaos: {injected} faults, {workload.summary()}", flush=True)
                injector.heal()
                workload.lift_cordons()
                due = time.monotonic() + options.calm
        injector.tick()
        time.sleep(0.02)
    injector.heal()
    print(f"chaos: all {injected} faults injected; waiting for the runs", flush=True)
    workload.wait_for_end(options.settle, heal=cluster.heal)
    evidence = Evidence(
        cluster.nodes_home,
        cluster.journal,
        frozenset(workload.cancelled),
        frozenset(injector.partitioned),
    )
    workload.wait_for_telemetry(evidence, 60.0)
    counts = dict(sorted(injector.counts.items()))
    counts["(doubled messages)"] = sum(proxy.doubled for proxy in cluster.proxies())
    print(f"chaos: {json.dumps(counts)}")
    print(f"chaos: {workload.summary()}, {time.monotonic() - began:.0f} s", flush=True)
    return violations(evidence)


if __name__ == "__main__":
    sys.exit(main())
