"""Runs on a real Slurm of two nodes: points, cancel, requeue, drain, a restarted controller.

Eight runs with fake ranks meet all of it at once; one with real ranks first.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.cluster import FAKE_TORCH
from tests.flows.embedded import ROOT, Orrery, train_spec
from tests.flows.slurm_cluster import BUNDLE, SlurmCluster, is_possible, open_folder

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

    def add(self, name: str, pools: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        """An engine with pools of one device per node, by REST: commands take seconds each."""
        assert self.orrery.client is not None
        settings = {"config": str(self.cluster.conf), "poll_s": 0.5, **settings}
        body = {"name": name, "kind": "slurm", "settings": settings}
        answer = self.orrery.client.post("engines", json=body)
        assert answer.status_code == 201, answer.text
        for pool, words in pools.items():
            body = {"settings": {"partition": "low", "devices_per_node": 1, **words}}
            answer = self.orrery.client.put(f"engines/{name}/pools/{pool}", json=body)
            assert answer.status_code == 200, answer.text

    def remove_all(self) -> None:
        """Remove its engines: other flows share the installation, which reads the jobs of each."""
        assert self.orrery.client is not None
        client = self.orrery.client
        for engine in client.get("engines").raise_for_status().json()["items"]:
            if engine["settings"].get("config") != str(self.cluster.conf):
                continue
            path = f"engines/{engine['name']}"
            for pool in engine["pools"]:
                client.delete(f"{path}/pools/{pool['name']}").raise_for_status()
            client.delete(path).raise_for_status()

    def add_fake(self, folder: Path) -> None:
        """Engine `fake`: real supervisors with the ranks of the chaos tests."""
        self.fake_home = folder / "home"
        self.journal = folder / "journal"
        self.journal.mkdir(parents=True)
        python = folder / "python"
        python.write_text(
            "#!/bin/sh\n"
            f"export PYTHONPATH={FAKE_TORCH}:$PYTHONPATH\n"
            f"export CHAOS_JOURNAL={self.journal} CHAOS_STEP_S=0.5\n"
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        self.add("fake", {"fake": {}}, home=str(self.fake_home), python=str(python))

    def starts(self, *runs: str) -> Counter[tuple[str, int]]:
        """How often each attempt of these fake runs has started, by run and attempt.

        The journal also holds the runs of tests before this one.
        """
        rows = [
            json.loads(line)
            for path in self.journal.glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return Counter(
            (row["run"], row["attempt"])
            for row in rows
            if row["kind"] == "start" and row["run"] in runs
        )

    def kill_supervisor(self, job: str) -> None:
        """SIGKILL, as by the kernel for lack of memory."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if (
                    process.environ().get("SLURM_JOB_ID") == job
                    and words[-1:] == ["workers.launcher.cluster_engines.job"]
                    and not words[0].endswith("srun")
                ):
                    process.kill()

    def submit(self, *, steps: int, pool: str = "hpc-low", ranks: int = 2, every: int = 5) -> str:
        resources = {"pool": pool}
        spec = train_spec(steps=steps, ranks=ranks, every=every, resources=resources)
        return self.orrery.submit(spec, "slurm")

    def until_states(self, run: str, states: list[str]) -> None:
        def reached() -> bool:
            return self.cluster.jobs_of(run) == states

        self.cluster.until(reached, f"jobs of run {run} are {states}", seconds=60)


@pytest.fixture(scope="module")
def slurm(installation: Orrery) -> Iterator[Slurm]:
    with open_folder() as folder:
        cluster = SlurmCluster(folder / "cluster")
        try:
            cluster.start()
            engine = Slurm(installation, cluster, folder / "home")
            pools = {"hpc-low": {}, "hpc-none": {"partition": "nowhere"}}
            engine.add("hpc", pools, home=str(engine.home))
            engine.add_fake(folder / "fake")
            yield engine
            engine.remove_all()
        finally:
            cluster.close()


def test_a_run_is_the_same_and_survives_what_happens_to_its_jobs(
    orrery: Orrery, slurm: Slurm
) -> None:
    """One run: points of two nodes, requeued by Slurm, then its controller is killed.

    Own nodes give the same losses for its spec without that.
    """
    assert orrery.client is not None
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
    orrery.until(lambda: orrery.events(run, "checkpoint_restored"), 300, "it resumes")
    orrery.until_step(run, last + 6)
    orrery.until(lambda: _complete(orrery.steps(run)), 60, "every step has its point once")
    ended = next(a for a in orrery.get(f"runs/{run}/attempts")["items"] if a["attempt"] == 1)
    assert ended["exit"]["class"] == "preempted"
    resumed_at = orrery.events(run, "checkpoint_restored")[0]["data"]["step"]

    # the controller dies under it: nothing is concluded, nothing starts twice
    slurm.cluster.kill_controller()
    last = orrery.steps(run)[-1]
    waiting = slurm.submit(steps=20, ranks=1)
    own = orrery.submit(train_spec(steps=100_000, every=5), "own")
    orrery.until_step(run, last + 3)
    slurm.cluster.start_controller()
    orrery.until_state(waiting, "finished")
    assert orrery.steps(waiting) == list(range(1, 21))
    assert len(slurm.cluster.jobs_of(waiting)) == 1
    assert orrery.state(run) == "running" and len(slurm.cluster.jobs_of(run)) == 2

    orrery.until_step(own, resumed_at + 3)
    orrery.client.post(f"runs/{own}/cancel")
    orrery.until_state(own, "cancelled")
    assert losses(orrery, run, resumed_at + 3) == losses(orrery, own, resumed_at + 3)

    # with a drained node, a further run of two nodes waits for a stated reason and can be cancelled
    slurm.cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    blocked = slurm.submit(steps=5)
    orrery.until(lambda: "down, drained or reserved" in str(_wait(orrery, blocked)), 60, "a reason")
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


def losses(orrery: Orrery, run: str, last: int) -> dict[int, float]:
    """`{step: loss}` up to this step."""
    series = orrery.get(f"runs/{run}/series", name="loss", raw=1, to=last)
    return dict(zip(series["x"], series["y"], strict=True))


def _complete(steps: list[int]) -> bool:
    return steps == list(range(1, len(steps) + 1))


def _wait(orrery: Orrery, run: str) -> str | None:
    entries = orrery.get("queue")["items"]
    return next((entry["reason"] for entry in entries if entry["run"] == run), None)


def test_eight_runs_survive_a_restart_requeues_a_drain_and_a_killed_supervisor(
    orrery: Orrery, slurm: Slurm
) -> None:
    """No run is lost, none starts twice, every point arrives once, reasons are right."""
    cluster, steps = slurm.cluster, 1200
    (slurm.journal / "hurry").unlink(missing_ok=True)
    runs = [slurm.submit(steps=steps, ranks=1, pool="fake", every=50) for _ in range(8)]
    for run in runs:
        orrery.until_step(run, 3)
    node = {run: attempt_of(orrery, run, 1)["placement"][0]["host"] for run in runs}
    assert Counter(node.values()) == {"n1": 4, "n2": 4}
    here = next(run for run in runs if node[run] == "n1")
    there, killed, *_ = [run for run in runs if node[run] == "n2"]

    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=disk")
    cluster.kill_controller()
    seen = {run: orrery.steps(run)[-1] for run in runs}
    for run in runs:  # they train on without the controller, on the drained node too
        orrery.until_step(run, seen[run] + 2)
    assert {orrery.state(run) for run in runs} == {"running"}
    cluster.start_controller()
    # a killed controller may not have saved the drain
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=disk")
    for run in (here, there):
        cluster.run("scontrol", "requeue", cluster.job_of(run))
    slurm.kill_supervisor(cluster.job_of(killed))
    for run in (here, there, killed):
        orrery.until(lambda run=run: attempt_of(orrery, run, 2), 120, "a second attempt")
    assert attempt_of(orrery, here, 1)["exit"]["class"] == "preempted"
    assert "requeued job" in attempt_of(orrery, there, 1)["exit"]["reason"]
    assert attempt_of(orrery, killed, 1)["exit"]["class"] == "infrastructure"
    # the node that is not drained has room for one of the three
    orrery.until(
        lambda: [_waits(orrery, run) for run in (here, there, killed)].count(True) == 2,
        120,
        "two wait for a stated reason",
        every_s=0.5,  # three requests each: there is a rate limit
    )
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    (slurm.journal / "hurry").touch()
    for run in runs:
        orrery.until_state(run, "finished")
        orrery.until(
            lambda run=run: orrery.steps(run) == list(range(1, steps + 1)),
            120,
            f"every step of run {run} has its point once",
        )
    expected = {(run, 1): 1 for run in runs} | {(run, 2): 1 for run in (here, there, killed)}
    assert slurm.starts(*runs) == expected
    for run in runs:
        assert len(cluster.jobs_of(run)) == (2 if run in (here, there, killed) else 1)


def test_a_run_that_slurm_preempts_saves_and_continues_after_the_other_job(
    orrery: Orrery, slurm: Slurm
) -> None:
    """Slurm sends SIGTERM to a job of a lower partition and grants it some time."""
    cluster, steps = slurm.cluster, 400
    (slurm.journal / "hurry").unlink(missing_ok=True)
    run = slurm.submit(steps=steps, ranks=1, pool="fake", every=50)
    orrery.until_step(run, 3)
    foreign = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    other = cluster.run("sbatch", "--parsable", *foreign, "--wrap=sleep 3600")
    orrery.until(lambda: attempt_of(orrery, run, 2), 120, "a second attempt")
    first = attempt_of(orrery, run, 1)
    assert first["exit"]["class"] == "preempted", first["exit"]
    cluster.until(lambda: cluster.state_of(other) == "RUNNING", "the other job runs", seconds=60)
    orrery.until(lambda: _waits(orrery, run), 60, "it waits for a stated reason")
    (slurm.journal / "hurry").touch()
    cluster.run("scancel", other)
    orrery.until_state(run, "finished")
    orrery.until(
        lambda: orrery.steps(run) == list(range(1, steps + 1)), 60, "each step has its point once"
    )
    assert slurm.starts(run) == {(run, 1): 1, (run, 2): 1}


def test_points_of_a_killed_supervisor_arrive_though_no_further_job_starts(
    orrery: Orrery, slurm: Slurm
) -> None:
    """The control plane sees the home, and sends what is left there."""
    (slurm.journal / "hurry").unlink(missing_ok=True)
    run = slurm.submit(steps=2000, ranks=1, pool="fake", every=50)
    orrery.until_step(run, 3)
    slurm.command("set", "fake", "--disable")
    try:
        identities = slurm.fake_home / "engine"
        name = attempt_of(orrery, run, 1)["placement"][0]["node"]
        assert (identities / f"{name}.json").exists()
        slurm.kill_supervisor(slurm.cluster.job_of(run))
        orrery.until(
            lambda: attempt_of(orrery, run, 1)["state"] == "exited", 120, "the attempt ends"
        )
        orrery.until(lambda: not (identities / f"{name}.json").exists(), 120, "everything is sent")
        folder = slurm.fake_home / "runs" / run / "attempt-1" / "node-0"
        assert json.loads((folder / "exit.json").read_text())["reported"] is True
        orrery.until(lambda: _complete(orrery.steps(run)), 60, "every step has its point once")
        assert len(slurm.cluster.jobs_of(run)) == 1
    finally:
        slurm.command("set", "fake", "--enable")
    assert orrery.client is not None
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled")


def test_the_check_of_the_bundle_runs_on_every_node(slurm: Slurm) -> None:
    """Also: prolog and epilog have run for every job, and refuse what they should."""
    cluster, port = slurm.cluster, (slurm.orrery.home / "valkey" / "port").read_text().strip()
    values = {"HOME": slurm.home, "PYTHON": sys.executable, "SOURCE": ROOT}
    values["BROKER"] = f"127.0.0.1:{port}"
    export = ",".join(["ALL", *(f"ORRERY_{name}={value}" for name, value in values.items())])
    script, output = str(BUNDLE / "check.sbatch"), slurm.home.parent / "check.log"
    cluster.run("sbatch", "--test-only", "--nodes=2", f"--export={export}", script)
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={output}", f"--export={export}"]
    job = cluster.run(*command, script)
    ended = ("COMPLETED", "FAILED")
    cluster.until(lambda: cluster.state_of(job) in ended, "the check ends", seconds=120)
    text = output.read_text()
    assert cluster.state_of(job) == "COMPLETED" and text.count("ok: ") == 6, text
    assert " n1: ok: home" in text and " n2: ok: broker" in text

    export = export.replace(f"ORRERY_HOME={slurm.home}", "ORRERY_HOME=/proc/none")
    command = ["sbatch", "--parsable", "--nodes=1", f"--output={output}", f"--export={export}"]
    job = cluster.run(*command, script)
    cluster.until(lambda: cluster.state_of(job) in ended, "the check ends", seconds=120)
    assert cluster.state_of(job) == "FAILED" and "FAILED: home /proc/none" in output.read_text()


def attempt_of(orrery: Orrery, run: str, number: int) -> Any:
    """The attempt of this number, or None."""
    attempts = orrery.get(f"runs/{run}/attempts")["items"]
    return next((one for one in attempts if one["attempt"] == number), None)


def _waits(orrery: Orrery, run: str) -> bool:
    return "waits in Slurm: " in str(_wait(orrery, run))
