"""Runs in pods that a simulated cluster starts: points, eviction, pause, kill, retry, cancel."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.embedded import ROOT, Orrery, train_spec
from tests.kubernetes.cluster import Cluster
from tests.matrix import FULL

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]


def command(orrery: Orrery, *words: str) -> Any:
    folder = orrery.home / "valkey"
    password, port = ((folder / name).read_text().strip() for name in ("password", "port"))
    environ = {
        **orrery.environ,
        "ORRERY_HOME": str(orrery.home),
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


@pytest.fixture(scope="module")
def cluster(installation: Orrery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("kubernetes")
    (folder / "kubeconfig").write_text("")
    made = Cluster(run_pods=True, admits=True)
    try:
        (folder / "kubeconfig").write_text(made.kubeconfig())
        settings = {
            "home": folder / "home",
            "source": ROOT,
            "python": sys.executable,
            "image": "orrery-node:test",
            "claim": "runs",
            "poll_s": 0.5,
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        login = ("--kind", "kubernetes", "--kubeconfig", str(folder / "kubeconfig"))
        command(installation, "add", "k8s", *words, *login)
        command(installation, "pool", "k8s", "k8s", "queue=default", "devices_per_node=1")
        yield made
        command(installation, "unpool", "k8s", "k8s")
        command(installation, "remove", "k8s")
    finally:
        made.close()


def losses(orrery: Orrery, run: str) -> list[float]:
    return orrery.get(f"runs/{run}/series", name="loss", raw=1)["y"]


def test_a_run_is_the_same_as_on_own_nodes_and_survives_what_happens_to_its_pods(
    orrery: Orrery, cluster: Cluster
) -> None:
    own = orrery.submit(train_spec(steps=30), "own")
    run = orrery.submit(train_spec(steps=30, resources={"pool": "k8s"}), "kubernetes")
    orrery.until_state(own, "finished")
    orrery.until_state(run, "finished")
    assert orrery.steps(run) == list(range(1, 31))  # each once, of two pods
    assert losses(orrery, run) == losses(orrery, own)
    placement = orrery.get(f"runs/{run}/attempts")["items"][0]["placement"]
    assert [share["host"] for share in placement] == ["kn1", "kn2"]

    # Kueue takes the quota of a running job: it continues from a checkpoint in a new JobSet
    long = orrery.submit(train_spec(steps=100_000, every=5, resources={"pool": "k8s"}), "evicted")
    orrery.until_step(long, 6)
    [name] = [one for one in cluster.jobsets() if one.startswith(f"orrery-{long}-")]
    last = orrery.steps(long)[-1]
    cluster.evict(name, "Preempted", "preempted to make room", "InClusterQueue")
    orrery.until(lambda: orrery.events(long, "checkpoint_restored"), 120, "it resumes")
    orrery.until_step(long, last + 6)
    assert name not in cluster.jobsets()
    attempts = orrery.get(f"runs/{long}/attempts")["items"]
    ended = next(one for one in attempts if one["attempt"] == 1)
    assert ended["exit"]["class"] == "preempted"
    assert "InClusterQueue: preempted to make room" in ended["exit"]["reason"]

    # paused: it saves, its pods end; resumed: a new JobSet continues from there
    assert orrery.client is not None
    orrery.client.post(f"runs/{long}/pause")
    orrery.until_state(long, "paused")
    orrery.until(lambda: not cluster.living(), 60, "no pod lives")
    last, restored = orrery.steps(long)[-1], len(orrery.events(long, "checkpoint_restored"))
    orrery.client.post(f"runs/{long}/resume")
    orrery.until(
        lambda: len(orrery.events(long, "checkpoint_restored")) > restored, 120, "it resumes"
    )
    orrery.until_step(long, last + 3)

    # SIGKILL to all of a pod's processes: retried, and what the dead supervisor left arrives
    attempts = len(orrery.get(f"runs/{long}/attempts")["items"])
    cluster.kill_pod(cluster.living()[0])
    orrery.until(
        lambda: len(orrery.get(f"runs/{long}/attempts")["items"]) > attempts, 120, "it is retried"
    )
    orrery.until_step(long, orrery.steps(long)[-1] + 6)
    orrery.until(lambda: is_complete(orrery.steps(long)), 60, "every step has its point once")

    # cancelled: its pods end
    orrery.client.post(f"runs/{long}/cancel")
    orrery.until_state(long, "cancelled")
    orrery.until(lambda: not cluster.living(), 60, "no pod lives")
    if FULL:  # a retry is a new JobSet that continues from a checkpoint, like a resumption
        last = orrery.steps(long)[-1]
        orrery.client.post(f"runs/{long}/retry")
        orrery.until_step(long, last + 2)
        orrery.client.post(f"runs/{long}/cancel")
        orrery.until_state(long, "cancelled")
        orrery.until(lambda: not cluster.living(), 60, "no pod lives")
    orrery.until(lambda: is_complete(orrery.steps(long)), 60, "every step has its point once")


def is_complete(steps: list[int]) -> bool:
    return steps == list(range(1, len(steps) + 1))
