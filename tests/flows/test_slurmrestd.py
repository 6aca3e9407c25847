"""Jobs by a real slurmrestd: the same as by squeue; what happens if it cannot be used."""

from __future__ import annotations

import pwd
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.fleet.cluster_engines.settings import Credentials, SlurmSettings
from orchestrator.scheduling.cluster_engines.interface import (
    EngineUnavailable,
    Order,
    SubmissionRefused,
)
from orchestrator.scheduling.cluster_engines.slurm import rest
from orchestrator.scheduling.cluster_engines.slurm.engine import Slurm
from tests.flows.slurm_cluster import SlurmCluster, has_rest, is_possible, open_folder

pytestmark = [
    pytest.mark.flow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_possible() or not has_rest(), reason="needs root and slurmrestd"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with open_folder() as folder:
        cluster = SlurmCluster(folder / "cluster")
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster) -> dict[str, str]:
    """`{name: number}` of a running, a failed, a held and a foreign job."""
    numbers = {}
    for name, words in {
        "orrery-1-1-runs": ("--wrap=sleep 600",),
        "orrery-2-1-fails": ("--wrap=exit 7",),
        "orrery-3-1-held": ("--hold", "--nodes=2", "--wrap=true"),
        "foreign": ("--wrap=true",),
    }.items():
        command = ("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null")
        numbers[name] = cluster.run(*command, *words)
    for name, state in (("orrery-1-1-runs", "RUNNING"), ("orrery-2-1-fails", "FAILED")):
        cluster.until(lambda job=numbers[name], is_=state: cluster.state_of(job) == is_, name)
    return numbers


def engine(
    cluster: SlurmCluster, token: str | None = None, *, timeout_s: float = 60, **settings: str
) -> Slurm:
    return Slurm(SlurmSettings(config=str(cluster.conf), timeout_s=timeout_s, **settings), token)


@pytest.mark.parametrize("version", ["v0.0.36", "v0.0.37", "v0.0.38"])
def test_slurmrestd_and_squeue_agree(
    cluster: SlurmCluster, jobs: dict[str, str], version: str
) -> None:
    port = engine(cluster, rest=cluster.start_rest(version))
    assert port._rest is not None
    seen = {view.name: view for view in port._rest.jobs()}
    assert seen == engine(cluster).watch() and "foreign" not in seen
    assert seen["orrery-1-1-runs"].phase == "active" and seen["orrery-1-1-runs"].hosts == ("n1",)
    assert seen["orrery-2-1-fails"].reason == "NonZeroExitCode"
    assert seen["orrery-3-1-held"].reason == "JobHeldUser"
    held = port.lookup(number=jobs["orrery-3-1-held"], name="orrery-3-1-held")
    assert held == seen["orrery-3-1-held"]
    assert port.lookup(number="999999", name="orrery-9-1-none") is None  # an unknown number
    assert port.problem == "", "an unknown job is no problem of slurmrestd"
    port.close()


@pytest.mark.skipif(not has_rest(tokens=True), reason="needs slurm-wlm-jwt-plugin")
def test_an_expired_token_is_a_problem_and_squeue_answers(
    cluster: SlurmCluster, jobs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = cluster.start_rest(tokens=True)
    monkeypatch.setattr(rest, "_RETRY_S", 0.0)
    ports = []
    for lifespan in (600, 1):
        text = cluster.run("scontrol", "token", "username=root", f"lifespan={lifespan}")
        token = Credentials.from_dict({"rest_token": text}).rest_token
        assert text == f"SLURM_JWT={token}"
        ports.append(engine(cluster, token, rest=url, rest_user="root"))
    valid, port = ports
    assert valid.watch() == engine(cluster).watch() and valid.problem == ""
    valid.close()
    time.sleep(2)
    assert set(port.watch()) == {name for name in jobs if name != "foreign"}
    assert (
        "refuses the login: the token expired at 20" in port.problem
        and "--rest-token" in port.problem
    )
    port.close()


def test_slurmrestd_of_another_version_or_none_is_a_problem_and_squeue_answers(
    cluster: SlurmCluster, jobs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = cluster.start_rest("v0.0.38")
    monkeypatch.setattr(rest, "_OLDEST", (0, 0, 39))
    monkeypatch.setattr(rest, "_RETRY_S", 0.0)
    port = engine(cluster, rest=url)
    assert set(port.watch()) == {name for name in jobs if name != "foreign"}
    assert "offers v0.0.38; this release reads v0.0.39 to" in port.problem
    monkeypatch.setattr(rest, "_OLDEST", (0, 0, 36))
    port.watch()
    assert port.problem == "", "it is tried again"
    port.close()
    server = cluster.rest[-1]
    server.terminate()
    server.wait(10)
    port = engine(cluster, rest=url)
    assert port.watch() and "does not answer" in port.problem
    port.close()


def test_without_a_controller_nothing_is_concluded(
    cluster: SlurmCluster, jobs: dict[str, str]
) -> None:
    url = cluster.start_rest()
    patient = engine(cluster, rest=url)
    assert patient.watch()
    patient.close()
    port = engine(cluster, rest=url, timeout_s=2)
    cluster.stop_controller()
    try:
        with pytest.raises(EngineUnavailable):
            port.watch()
    finally:
        cluster.start_controller()
        port.close()


def test_a_token_needs_tls_or_this_machine(tmp_path: Path) -> None:
    for url in ("http://slurm.example.org:6820", "unix://x", "ftp://x", "https://a b"):
        with pytest.raises(ValueError, match="https://"):
            SlurmSettings(rest=url)


def test_a_user_without_the_right_to_a_partition_is_refused_with_a_hint(
    cluster: SlurmCluster,
) -> None:
    """By Slurm itself, which lets root use every partition: the job is one of another user."""
    settings = SlurmSettings(config=str(cluster.conf), identity="submitter", home="/tmp/orrery")
    order = Order(
        name="orrery-7-1-refused",
        run=7,
        attempt=1,
        owner=pwd.getpwuid(65534).pw_name,  # a user without permission
        nodes=1,
        per_node=1,
        gpu=False,
        ticket="e30=",
        pool={"partition": "secret"},
    )
    port = Slurm(settings)
    with pytest.raises(SubmissionRefused) as refused:
        port.submit(order)
    assert "permi" in str(refused.value).lower() and "Choose another pool" in refused.value.hint
    assert order.name not in port.watch()
