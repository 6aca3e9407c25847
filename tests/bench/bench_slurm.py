"""Submit until the first visible point: own nodes against a real Slurm of two nodes, in turn.

Stages are read from timestamps of the programs that take part (submit, Slurm has the job, Slurm
allocates, the supervisor is up, the point is visible), so a stage that waits is seen apart from one
that computes. Then cancel until the run is cancelled and its job has ended. Needs root and Debian's
Slurm. ORRERY_BENCH_PAIRS sets the number of pairs (5); arguments select first-point or cancel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tests.bench.record import record
from tests.flows.embedded import ROOT, Orrery, train_spec
from tests.flows.slurm_cluster import SlurmCluster, is_possible
from tests.flows.test_slurm import Slurm

PAIRS = int(os.environ.get("ORRERY_BENCH_PAIRS", "5"))
GOAL_S = 3.0  # longer than on own nodes, without Slurm's queue time


def main(parts: list[str]) -> int:
    if not is_possible():
        print("bench_slurm needs root, munge and slurm-wlm")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="orrery-bench-slurm-"))
    cluster = SlurmCluster(folder / "cluster")
    orrery = Orrery(folder / "home", devices=1)
    try:
        cluster.start()
        environ = {**orrery.environ, "ORRERY_HOME": str(orrery.home)}
        orrery.home.mkdir()
        migrate = [sys.executable, str(ROOT / "manage.py"), "migrate", "--verbosity=0"]
        subprocess.run(migrate, env=environ, check=True)  # not within the time that a start has
        orrery.start()
        engine = Slurm(orrery, cluster, folder / "shared")
        engine.command("add", "hpc", f"config={cluster.conf}", f"home={engine.home}")
        engine.command("pool", "hpc", "hpc-low", "partition=low", "devices_per_node=1")
        orrery.until(lambda: orrery.get("engines/hpc")["ok"], 60, "the engine answers")
        if "first-point" in parts:
            rows = [(_own(orrery), _slurm(orrery, cluster, engine.home)) for _ in range(PAIRS + 1)]
            _record(rows[1:])  # the first pair reads programs from the disk
        if "cancel" in parts:
            _record_cancel([_cancelled(orrery, cluster) for _ in range(PAIRS)])
    finally:
        orrery.close()
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _own(orrery: Orrery) -> dict[str, float]:
    run, began, seen = _run(orrery, {})
    up = _supervisor_up(orrery.home / "runs", run)
    return {"total": seen - began, "until_supervisor": up - began, "after": seen - up}


def _slurm(orrery: Orrery, cluster: SlurmCluster, home: Path) -> dict[str, float]:
    run, began, seen = _run(orrery, {"pool": "hpc-low"})
    text = (cluster.folder / "slurmctld.log").read_text()
    job = cluster.job_of(run)
    submitted = _logged(text, rf"submit_batch_job: JobId={job} ")
    allocated = _logged(text, rf"(?:Allocate|Started) JobId={job} ")
    up = _supervisor_up(home / "runs", run)
    return {
        "total": seen - began,
        "until_job": submitted - began,
        "queue": max(0.0, allocated - submitted),
        "until_supervisor": up - allocated,
        "after": seen - up,
    }


def _run(orrery: Orrery, resources: dict[str, str]) -> tuple[str, float, float]:
    """`(run, submitted, first point visible)` of a run of one process, after its end."""
    more = {"resources": resources} if resources else {}
    spec = train_spec(steps=5, ranks=1, **more)
    began = time.time()
    run = orrery.submit(spec, "bench")
    deadline = time.monotonic() + 300
    while not orrery.steps(run):
        assert time.monotonic() < deadline, orrery.last_lines()
        time.sleep(0.1)
    seen = time.time()
    orrery.until_state(run, "finished")
    return run, began, seen


def _supervisor_up(runs: Path, run: str) -> float:
    """When the supervisor's program began its work, by its own clock."""
    [path] = (runs / run).glob("attempt-1/**/supervisor.json")
    return float(json.loads(path.read_text())["up"])


def _logged(text: str, pattern: str) -> float:
    """The time of a line in slurmctld's log, which has milliseconds."""
    matched = re.search(rf"^\[([^\]]+)\].*{pattern}", text, re.MULTILINE)
    assert matched is not None, f"slurmctld did not log {pattern}"
    return datetime.fromisoformat(matched[1]).timestamp()


def _cancelled(orrery: Orrery, cluster: SlurmCluster) -> float:
    """Seconds from the request to cancel until the run is cancelled and its job has ended."""
    spec = train_spec(steps=100_000, ranks=1, every=50, resources={"pool": "hpc-low"})
    run = orrery.submit(spec, "cancelled")
    orrery.until_step(run, 2)
    assert orrery.client is not None
    began = time.monotonic()
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled")
    ended = ["COMPLETED"], ["CANCELLED"]
    cluster.until(lambda: cluster.jobs_of(run) in ended, "the job has ended")
    return time.monotonic() - began


def _record_cancel(seconds: list[float]) -> None:
    record(
        "engines",
        what="Slurm: cancel until the run is cancelled and its job has ended, the longest",
        value=max(seconds),
        unit="s",
        figure="<= 10",
        digits=1,
        all=[round(each, 1) for each in seconds],
    )


def _record(rows: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    def median(value: Callable[[tuple[dict[str, float], dict[str, float]]], float]) -> float:
        return statistics.median(value(row) for row in rows)

    record(
        "engines",
        what="Slurm: submit until the first point, longer than own nodes without queue time",
        value=median(lambda row: row[1]["total"] - row[1]["queue"] - row[0]["total"]),
        unit="s",
        figure=f"<= {GOAL_S:g}",
        digits=2,
        pairs=len(rows),
        own={name: round(median(lambda row, n=name: row[0][n]), 2) for name in rows[0][0]},
        slurm={name: round(median(lambda row, n=name: row[1][n]), 2) for name in rows[0][1]},
        differences=[
            round(slurm["total"] - slurm["queue"] - own["total"], 2) for own, slurm in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["first-point", "cancel"]))
