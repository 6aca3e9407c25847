"""Runs on a real Slurm of two nodes: points, cancel, requeue, drain, a restarted controller."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.embedded import ROOT, Orrery, train_spec
from tests.flows.slurm_cluster import SlurmCluster, is_possible

pytestmark = [
    pytest.mark.flow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="needs root, munge and slurm-wlm"),
]


class Slurm:
    """The cluster as engine `hpc` of an installation, with one device per node."""

    def __init__(self, orrery: Orrery, cluster: SlurmCluster, home: Path) -> None:
        self.orrery, self.cluster, self.home = orrery, cluster, home

    def command(self, *words: str) -> Any:
        folder = self.orrery.home / "valkey"
        password, port = ((folder / name).read_text().strip() for name in ("password", "port"))
        environ = {
            **self.orrery.environ,
            "ORRERY_HOME": str(self.orrery.home),
            "REDIS_URL": f"redis://:{password}@127.0.0.1:{port}/0",
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), "engine", *words],
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, *, steps: int, pool: str = "hpc-low", ranks: int = 2, every: int = 5) -> str:
        resources = {"pool": pool}
        spec = train_spec(steps=steps, ranks=ranks, every=every, resources=resources)
        return self.orrery.submit(spec, "slurm")

    def until_states(self, run: str, states: list[str]) -> None:
        def reached() -> bool:
            return self.cluster.jobs_of(run) == states

        self.cluster.until(reached, f"jobs of run {run} are {states}", seconds=60)


@pytest.fixture(scope="module")
def slurm(installation: Orrery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    cluster = SlurmCluster(folder / "cluster")
    try:
        cluster.start()
        engine = Slurm(installation, cluster, folder / "home")
        engine.command("add", "hpc", f"config={cluster.conf}", f"home={engine.home}", "poll_s=0.5")
        for pool, partition in (("hpc-low", "low"), ("hpc-none", "nowhere")):
            engine.command("pool", "hpc", pool, f"partition={partition}", "devices_per_node=1")
        yield engine
    finally:
        cluster.close()


def test_a_run_is_the_same_and_survives_what_happens_to_its_jobs(
    orrery: Orrery, slurm: Slurm
) -> None:
    """One run: points of two nodes, requeued by Slurm, then its controller is killed."""
    wrong = slurm.submit(steps=1, pool="hpc-none")
    run = slurm.submit(steps=100_000)
    orrery.until_state(wrong, "failed")
    reason = orrery.get(f"runs/{wrong}")["exit"]["reason"]
    assert "Slurm refused the job" in reason and "Correct `partition` of the pool" in reason
    orrery.until_step(run, 6)
    placement = orrery.get(f"runs/{run}/attempts")["items"][0]["placement"]
    assert [share["host"] for share in placement] == ["n1", "n2"]

    last = orrery.steps(run)[-1]
    # Slurm requeues it: a new attempt resumes in a new job, the old one does not start again
    slurm.cluster.run("scontrol", "requeue", slurm.cluster.job_of(run))
    orrery.until(
        lambda: len(orrery.get(f"runs/{run}/attempts")["items"]) == 2,
        120,
        "a second attempt exists",
    )
    orrery.until(lambda: orrery.events(run, "checkpoint_restored"), 120, "it resumes")
    orrery.until_step(run, last + 6)
    orrery.until(lambda: _complete(orrery.steps(run)), 60, "every step has its point once")
    ended = next(a for a in orrery.get(f"runs/{run}/attempts")["items"] if a["attempt"] == 1)
    assert ended["exit"]["class"] == "preempted"

    # the controller dies under it: nothing is concluded, nothing starts twice
    slurm.cluster.kill_controller()
    last = orrery.steps(run)[-1]
    waiting = slurm.submit(steps=20, ranks=1)
    orrery.until_step(run, last + 3)
    slurm.cluster.start_controller()
    orrery.until_state(waiting, "finished")
    assert orrery.steps(waiting) == list(range(1, 21))
    assert len(slurm.cluster.jobs_of(waiting)) == 1
    assert orrery.state(run) == "running" and len(slurm.cluster.jobs_of(run)) == 2

    # with a drained node, a further run of two nodes waits for a stated reason and can be cancelled
    slurm.cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    blocked = slurm.submit(steps=5)
    orrery.until(lambda: "down, drained or reserved" in str(_wait(orrery, blocked)), 60, "a reason")
    assert orrery.client is not None
    orrery.client.post(f"runs/{blocked}/cancel")
    orrery.until_state(blocked, "cancelled")
    slurm.until_states(blocked, ["CANCELLED"])
    assert orrery.state(run) == "running"  # a drained node lets it continue
    slurm.cluster.run("scontrol", "update", "nodename=n2", "state=resume")

    # cancelled in Slurm by a person: the run is cancelled and does not start again
    slurm.cluster.run("scancel", slurm.cluster.job_of(run))
    orrery.until_state(run, "cancelled")
    assert "cancelled in Slurm, not by Orrery" in orrery.get(f"runs/{run}")["exit"]["reason"]
    # cancelled in Orrery: the job ends
    second = slurm.submit(steps=100_000, ranks=1)
    orrery.until_step(second, 2)
    orrery.client.post(f"runs/{second}/cancel")
    orrery.until_state(second, "cancelled")
    slurm.cluster.until(
        lambda: slurm.cluster.jobs_of(second)[0] in ("COMPLETED", "CANCELLED"), "the job ends"
    )


def _complete(steps: list[int]) -> bool:
    return steps == list(range(1, len(steps) + 1))


def _wait(orrery: Orrery, run: str) -> str | None:
    entries = orrery.get("queue")["items"]
    return next((entry["reason"] for entry in entries if entry["run"] == run), None)
