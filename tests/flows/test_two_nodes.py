"""Two agents on one machine share a run: two nodes, two ranks each, one rendezvous, one loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.flows.embedded import ROOT, Orrery, train_spec
from tests.flows.gate import submitted
from tests.migrated_database import install

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]


class SecondNode:
    """An agent with a home of its own, joined by a token as an operator makes one."""

    def __init__(self, orrery: Orrery, home: Path, *, devices: int = 2) -> None:
        self.orrery, self.home, self.name, self.devices = orrery, home, "second", devices
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self.orrery.home / "valkey"
        password, port = ((folder / name).read_text().strip() for name in ("password", "port"))
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        self.home.mkdir(parents=True, exist_ok=True)
        joined = (self.home / "agent" / self.name / "node.json").exists()
        environ = {
            **self.orrery.environ,
            "REDIS_URL": url,
            **({} if joined else {"ORRERY_JOIN": self._token(url)}),
        }
        words = [
            sys.executable,
            "-m",
            "workers.agent",
            "--name",
            self.name,
            "--home",
            str(self.home),
        ]
        words += ["--devices", str(self.devices), "--address", "127.0.0.1"]
        with open(self.home / "agent.log", "ab") as log:
            self.process = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=log, stderr=log)

    def _token(self, url: str) -> str:
        code = (
            "from orchestrator.fleet.services import join_token_create; print('token', "
            "join_token_create(by=None))"
        )
        environ = {**self.orrery.environ, "ORRERY_HOME": str(self.orrery.home), "REDIS_URL": url}
        command = [sys.executable, str(ROOT / "manage.py"), "shell", "-c", code]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.split("token ")[-1].strip()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.home == self.orrery.home:
            return  # what is left there is ended with all else
        for process in psutil.process_iter():
            try:
                if process.environ().get("ORRERY_RUN_DIR", "").startswith(str(self.home)) or str(
                    self.home
                ) in " ".join(process.cmdline()):
                    process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def orrery(tmp_path: Path, migrated_database: Path) -> Iterator[Orrery]:
    server = Orrery(tmp_path / "home", devices=2)
    install(migrated_database, server.home)
    yield server
    server.close()


@pytest.fixture
def second(orrery: Orrery, tmp_path: Path) -> Iterator[SecondNode]:
    orrery.start()
    node = SecondNode(orrery, tmp_path / "second-home")
    node.start()
    orrery.until(lambda: len(orrery.get("nodes")["items"]) == 2, 120, "the second node joined")
    yield node
    node.close()


def test_a_run_spans_two_nodes_and_survives_the_loss_of_an_agent(
    orrery: Orrery, second: SecondNode
) -> None:
    run = orrery.submit(train_spec(steps=150, ranks=4, every=50))
    orrery.until_step(run, 20)
    attempt = orrery.get(f"runs/{run}/attempts")["items"][0]
    shares = sorted(attempt["placement"], key=lambda share: share["node_rank"])
    assert [len(share["devices"]) for share in shares] == [2, 2] and {"second"} < {
        share["node"] for share in shares
    }

    # unreachable is not failed: the supervisor outlives its agent, which finds it again
    assert second.process is not None
    second.process.send_signal(signal.SIGKILL)
    second.process.wait()
    second.start()

    assert orrery.until_state(run, "finished", "failed", "cancelled") == "finished", orrery.get(
        f"runs/{run}"
    )["exit"]
    assert len(orrery.get(f"runs/{run}/attempts")["items"]) == 1
    losses = {}
    orrery.until(
        lambda: all(len(orrery.steps(run, rank=rank)) == 150 for rank in range(4)),
        60,
        "all points are reported",
    )
    for rank in range(4):
        assert orrery.steps(run, rank=rank) == list(range(1, 151)), f"rank {rank} lacks points"
        losses[rank] = orrery.get(f"runs/{run}/series", name="loss", rank=rank, raw=1)["y"]
    assert losses[0] == losses[1] == losses[2] == losses[3], "one loss, global over both nodes"
    for home in (second.home, orrery.home):
        folder = home / "runs" / run / "attempt-1"
        match = {int(path.name[5:]) for path in folder.glob("rank-*")}
        assert len(match) == 2, f"{folder} holds the ranks of its own node, found {match}"
    if shares[0]["node"] != "second":
        assert {
            int(p.name[5:]) for p in (second.home / "runs" / run / "attempt-1").glob("rank-*")
        } == {2, 3}


def test_a_lost_rank_ends_both_nodes_and_the_run_resumes_where_directories_are_shared(
    tmp_path: Path, migrated_database: Path
) -> None:
    orrery = Orrery(tmp_path / "home", devices=1, environ={"ORRERY_SHARED_RUNS": "1"})
    install(migrated_database, orrery.home)
    second = SecondNode(orrery, orrery.home, devices=1)
    try:
        orrery.start()
        second.start()
        orrery.until(lambda: len(orrery.get("nodes")["items"]) == 2, 120, "the second node joined")
        with submitted(orrery, train_spec(steps=100, ranks=2, every=20), place="node-0") as (
            run,
            gate,
        ):
            orrery.until_step(run, gate.to(45))
            folders = sorted(
                path.name for path in (orrery.home / "runs" / run / "attempt-1").glob("node-*")
            )
            assert folders == ["node-0", "node-1"], "each node's supervisor has files of its own"
            victim = next(
                (orrery.home / "runs" / run / "attempt-1" / "node-1").glob("rank-*/process.json")
            )
            os.kill(json.loads(victim.read_text())["pid"], signal.SIGKILL)
            gate.open()
            orrery.until(
                lambda: len(orrery.get(f"runs/{run}/attempts")["items"]) == 2,
                120,
                "a second attempt",
            )
        first = min(
            orrery.get(f"runs/{run}/attempts")["items"], key=lambda attempt: attempt["attempt"]
        )
        assert first["exit_class"] == "infrastructure" and "SIGKILL" in first["exit"]["reason"]
        ended = orrery.until_state(run, "finished", "failed", "cancelled")
        assert ended == "finished", orrery.get(f"runs/{run}")["exit"]
        orrery.until_reported(run)
        assert orrery.steps(run) == list(range(1, 101))
        restored = [event["data"]["step"] for event in orrery.events(run, "checkpoint_restored")]
        assert restored and restored[0] >= 40
    finally:
        second.close()
        orrery.close()
