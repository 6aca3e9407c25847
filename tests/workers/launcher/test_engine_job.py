"""Supervisors in jobs of an engine: what a killed one left is sent by the next job, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.workers.launcher.harness import ROOT, Node, script
from tests.workers.launcher.test_environment import order_of, project
from tests.workers.launcher.test_program import packed
from tests.workers.launcher.test_store_link import SAVES
from workers.contracts.wire import envelope, names
from workers.contracts.wire.cluster_engines.jobs import LATE_PROGRAM, JobMember, JobTicket
from workers.contracts.wire.programs.program_files import ProgramFile
from workers.launcher.maintenance import engine_home
from workers.launcher.rundir import RunDir, read_json

pytestmark = pytest.mark.flow

WRITES = """
    for n in range(1, 6):
        point(n)
    time.sleep(600)
"""
CODE = "import small\nprint('small', small.version, flush=True)\n" + script(SAVES)


class Member(Node):
    """The control plane's side of one supervisor in a job."""

    def start(
        self, order: dict[str, Any], job: str, *, pod: bool = False
    ) -> subprocess.Popen[bytes]:
        """Publish the order and start what srun starts, or the program of a pod."""
        text = envelope.seal(
            self.secret, names.KIND_LAUNCH, order, ttl_s=600, now=time.time(), node=self.name
        )
        with redis.Redis.from_url(self.url) as client:
            client.set(names.node_key(self.name, names.ENGINE_ORDER), text)
        member = JobMember(name=self.name, secret=self.secret.hex(), redis=self.url)
        ticket = JobTicket(home=str(self.home), members=[member])
        here = {"SLURM_NODEID": "0", "SLURM_JOB_ID": job}
        if pod:
            here = {names.JOB_ID: job, "JOB_COMPLETION_INDEX": "0"}
        environ = {**os.environ, **here, names.ENGINE_TICKET: ticket.to_text()}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "workers.launcher.cluster_engines.job"],
            cwd=ROOT,
            env=environ,
        )


@pytest.fixture
def members(tmp_path: Path, redis_url: str) -> Iterator[tuple[Member, Member]]:
    pair = (
        Member(tmp_path / "home", redis_url, "hpc.job71.0", ingest=False),
        Member(tmp_path / "home", redis_url, "hpc.job72.0"),
    )
    yield pair
    for member in pair:
        member.close()


def test_the_next_job_sends_what_a_killed_supervisor_left_and_deletes_garbage(
    members: tuple[Member, Member],
) -> None:
    first, second = members
    folder = "runs/7/attempt-1/node-0"
    order = first.order(script(WRITES, points=True), ranks=1, run_dir=folder)
    process = first.start(order, "1")
    left, file = RunDir(first.home / folder), engine_home.node_file(first.home, first.name)
    first.until(lambda: first.seqs("points", 0)[-1:] == [5] or None, 120, "all points were sent")
    # SIGKILL; ingest has acknowledged nothing, so whether the points arrived is unknown
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert file.exists() and not left.exit.exists()
    first.batches.clear()
    first.ingest = True
    old = first.home / "runs" / "5" / "attempt-1"
    RunDir(old).path.mkdir(parents=True)
    (old / "order.json").write_text("{}")
    (old / "exit.json").write_text('{"reported": true}')

    more = {
        "attempt": 2,
        "run_dir": "runs/7/attempt-2/node-0",
        "left": [
            {"node": first.name, "run_dir": folder},
            {"node": "hpc.job70.0", "run_dir": "runs/6/attempt-1/node-0"},  # nothing is left
        ],
        "collect": {"attempts": ["runs/5/attempt-1"], "scan": True},
    }
    collected: list[dict[str, Any]] = []
    again = second.order(script("print('again')"), ranks=1, **more)
    process = second.start(again, "2")
    assert second.exited(again)["class"] == "ok"
    assert process.wait(120) == 0
    # all of its points, each once, under the identity that wrote them
    assert first.seqs("points", 0) == [1, 2, 3, 4, 5]
    ended = first.exited(order)
    assert ended["class"] == "infrastructure" and "supervisor died" in ended["reason"]
    assert not file.exists() and read_json(left.exit)["reported"] is True
    assert not engine_home.node_file(second.home, second.name).exists()
    assert not old.exists()
    with redis.Redis.from_url(second.url, decode_responses=True) as client:
        for _, fields in client.xrange(names.reports_stream(second.name)):
            text = fields[names.FIELD_MESSAGE]
            if envelope.peek(text)[0] == names.KIND_COLLECTED:
                kind = names.KIND_COLLECTED
                body = envelope.open_envelope(second.secret, text, kind=kind, now=time.time())
                collected.append(body)
    assert collected[0]["collected"][0]["path"] == "runs/5/attempt-1"
    assert [each["name"] for each in collected[1]["runs"]] == ["5", "7"]


def test_the_control_plane_sends_what_a_killed_supervisor_left_without_a_job(
    members: tuple[Member, Member],
) -> None:
    """Where it sees the home; the ranks wrote points after the supervisor had gone."""
    member, _ = members
    folder = "runs/7/attempt-1/node-0"
    order = member.order(script(WRITES, points=True), ranks=1, run_dir=folder)
    process = member.start(order, "1")
    file = engine_home.node_file(member.home, member.name)
    member.until(lambda: member.seqs("points", 0)[-1:] == [5] or None, 120, "all points were sent")
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    member.batches.clear()
    member.ingest = True
    task = {"home": str(member.home), "left": [{"node": member.name, "run_dir": folder}]}
    for _ in range(2):  # a repetition is harmless
        done = subprocess.run(
            [sys.executable, "-m", LATE_PROGRAM],
            input=json.dumps(task),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert member.seqs("points", 0) == [1, 2, 3, 4, 5]
    assert member.exited(order)["class"] == "infrastructure" and not file.exists()


@pytest.mark.parametrize("pod", [False, True], ids=["slurm", "kubernetes"])
def test_a_job_has_code_packages_and_store_of_a_script(
    members: tuple[Member, Member], tmp_path: Path, pod: bool
) -> None:
    """As under an agent: the code of the submit, a lock file, and copies in the store."""
    _, member = members
    work = project(tmp_path)
    (work / "train.py").write_text("raise SystemExit('edited after the submit')")
    (tmp_path / "store").mkdir()
    lock = "small==1.0\n"
    (work / "requirements.txt").write_text(lock)
    files = {"train.py": CODE.encode(), "requirements.txt": lock.encode()}
    program = packed({name: ProgramFile.of(text) for name, text in files.items()}, work)
    order = order_of(member, work, {"lock": "requirements.txt"})
    folder = {"run_dir": "runs/7/attempt-1/node-0", "shared_dir": "runs/7"}
    order |= {**folder, "program": program, "store": {"url": str(tmp_path / "store")}}
    process = member.start(order, "1", pod=pod)
    assert member.exited(order)["class"] == "ok", member.lines(0)
    assert member.lines(0) == ["small 1.0", "trained on"]
    assert process.wait(120) == 0
    assert len(list((tmp_path / "store").rglob("weights"))) == 1
    stored = [r["data"]["type"] for r in member.reports if r["type"] == "event"]
    assert "environment_prepared" in stored and "checkpoint_stored" in stored
