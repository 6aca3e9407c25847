"""Slurm with accounting: jobs under their submitter's Unix account, accounts and QOS as pools.

The submitter is another user than the controller's, with rights to one account and some QOS.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.fleet.cluster_engines.settings import SlurmSettings
from orchestrator.scheduling.cluster_engines.slurm.engine import Slurm as SlurmEngine
from tests.flows.embedded import Orrery, train_spec
from tests.flows.slurm_cluster import (
    USER,
    SlurmCluster,
    has_accounting,
    is_possible,
    open_folder,
)
from tests.flows.test_slurm import Slurm, attempt_of
from tests.other_users import as_seen_by_others  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.flow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="needs root, munge and slurm-wlm"),
    pytest.mark.skipif(not has_accounting(), reason="needs slurmdbd and mariadb-server-core"),
]
PERSON = pwd.getpwnam(USER)
POOLS = {
    "lab": {"account": "lab"},
    "limited": {"account": "lab", "qos": "limited"},
    "closed": {"account": "closed"},
    "unknown": {"account": "nowhere"},
    "long": {"account": "lab", "qos": "long"},
    "no-qos": {"account": "lab", "qos": "nowhere"},
}


@pytest.fixture(scope="module")
def slurm(
    installation: Orrery,
    as_seen_by_others: list[str],  # noqa: F811
) -> Iterator[Slurm]:
    """Engine `people`, whose jobs run as their submitters."""
    with open_folder() as folder:
        cluster = SlurmCluster(folder / "cluster")
        cluster.view = as_seen_by_others
        try:
            cluster.start(accounting=True)
            home = folder / "home"
            home.mkdir()
            home.chmod(0o1777)
            engine = Slurm(installation, cluster, home)
            engine.add("people", POOLS, home=str(home), identity="submitter")
            yield engine
            engine.remove_all()
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def person(installation: Orrery) -> Iterator[httpx.Client]:
    with installation.log_in(USER, "submitter") as client:
        yield client


def submit(client: httpx.Client, pool: str) -> str:
    spec = train_spec(steps=100_000, ranks=1, every=5, resources={"pool": pool})
    answer = client.post("runs", json={"name": pool, "spec": spec})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_a_job_runs_as_its_submitter_and_resumes_as_the_same(
    orrery: Orrery, slurm: Slurm, person: httpx.Client
) -> None:
    """Its processes and files have the submitter's user and group, and no right of root's."""
    cluster = slurm.cluster
    run = submit(person, "limited")
    second = submit(person, "limited")  # the QOS allows one job per user
    orrery.until_step(run, 6)
    processes = [one for one in _processes(cluster.job_of(run)) if _is_of_orrery(one)]
    assert processes
    for process in processes:
        assert set(process.uids()) == {PERSON.pw_uid}, process
        assert set(process.gids()) == {PERSON.pw_gid}, process
        groups = f"/proc/{process.pid}/status"
        listed = next(line for line in Path(groups).read_text().splitlines() if "Groups:" in line)
        assert "0" not in listed.split()[1:], "the group of root"
    written = list((slurm.home / "runs" / run).rglob("*"))
    assert any("checkpoints" in str(path) for path in written)
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in written}
    assert owners == {(PERSON.pw_uid, PERSON.pw_gid)}
    identity = slurm.home / "engine"
    assert (identity.stat().st_uid, identity.stat().st_mode & 0o077) == (PERSON.pw_uid, 0)
    listed = cluster.run("squeue", "-h", "-j", cluster.job_of(run), "-o", "%u %a %q")
    assert listed == f"{USER} lab limited"

    reason = orrery.until(lambda: _waiting(orrery, second), 60, "a reason")
    assert "a limit of the QOS is reached (Slurm: QOSMaxJobsPerUserLimit)" in reason
    person.post(f"runs/{second}/cancel")
    orrery.until_state(second, "cancelled")

    last = orrery.steps(run)[-1]
    cluster.run("scontrol", "requeue", cluster.job_of(run))
    orrery.until(lambda: orrery.events(run, "checkpoint_restored"), 300, "it resumes")
    orrery.until_step(run, last + 3)
    first = attempt_of(orrery, run, 1)
    assert first["exit"]["class"] == "preempted"
    began = time.monotonic()
    person.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled")
    cluster.until(lambda: not _living(cluster, run), "the job ends")
    print(f"cancelled within {time.monotonic() - began:.1f} s")
    steps = orrery.steps(run)
    assert steps == list(range(1, len(steps) + 1))


def test_accounts_and_qos_without_rights_are_refused_with_a_hint(
    orrery: Orrery, slurm: Slurm, person: httpx.Client
) -> None:
    """Nothing is started, and the run says what to change."""
    expected = {
        "closed": ("Invalid account", "Correct `account` of the pool"),
        "unknown": ("Invalid account", "Correct `account` of the pool"),
        "long": ("Invalid qos", "Correct `qos` of the pool"),
        "no-qos": ("Invalid qos", "Correct `qos` of the pool"),
    }
    runs = {pool: submit(person, pool) for pool in expected}
    assert orrery.client is not None
    stranger = submit(orrery.client, "lab")  # admin has no Unix account
    for pool, (message, hint) in expected.items():
        orrery.until_state(runs[pool], "failed")
        ended = orrery.get(f"runs/{runs[pool]}")["exit"]
        assert ended["class"] == "user_error", ended
        assert "Slurm refused the job: " in ended["reason"]
        assert message in ended["reason"] and hint in ended["reason"], ended
        assert len(orrery.get(f"runs/{runs[pool]}/attempts")["items"]) == 1, "nothing is retried"
        assert slurm.cluster.jobs_of(runs[pool]) == []
    orrery.until_state(stranger, "failed")
    reason = orrery.get(f"runs/{stranger}")["exit"]["reason"]
    assert "there is no Unix account admin" in reason and "Create it" in reason


def test_sacct_agrees_with_squeue_on_ended_jobs(slurm: Slurm) -> None:
    cluster = slurm.cluster
    port = SlurmEngine(SlurmSettings(config=str(cluster.conf), home=str(slurm.home)))
    name = "orrery-1-1-accounted"
    command = ["sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", "--wrap=exit 7"]
    job = cluster.run(*command)
    cluster.until(lambda: cluster.state_of(job) == "FAILED", "the job ends")
    seen = port.watch()[name]
    # scontrol does not know the number of a job that was forgotten: sacct answers
    cluster.until(lambda: port.lookup(number="999999", name=name), "the job is accounted")
    known = port.lookup(number="999999", name=name)
    assert known is not None
    assert (known.number, known.state, known.phase, known.exit_class, known.hosts) == (
        seen.number,
        seen.state,
        seen.phase,
        seen.exit_class,
        seen.hosts,
    )


def _processes(job: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job and process.pid != os.getpid():
                yield process


def _is_of_orrery(process: psutil.Process) -> bool:
    """The supervisor and the ranks, not Slurm's own programs."""
    with contextlib.suppress(psutil.Error):
        return any(word.startswith("workers.") for word in process.cmdline())
    return False


def _waiting(orrery: Orrery, run: str) -> str:
    entries = orrery.get("queue")["items"]
    text = next((entry["reason"] for entry in entries if entry["run"] == run), None) or ""
    return text if "waits in Slurm: a limit" in text else ""


def _living(cluster: SlurmCluster, run: str) -> bool:
    return any(state not in ("COMPLETED", "CANCELLED") for state in cluster.jobs_of(run)[-1:])
