"""Which supervisors of ended jobs the control plane sends for, as whom, and how often."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common import clock
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.cluster_engines import late_points
from orchestrator.scheduling.cluster_engines import turns as turns_module
from orchestrator.scheduling.cluster_engines.late_points import LatePoints
from orchestrator.scheduling.cluster_engines.turns import EngineTurns
from orchestrator.scheduling.models import EngineJob
from tests import factories
from workers.contracts.wire.cluster_engines.jobs import IDENTITIES, LATE_PROGRAM, member_name

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


class Started:
    """Processes that were started, with their input."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.tasks: list[dict[str, Any]] = []
        self.running = False

    def __call__(self, words: list[str], **options: Any) -> Any:
        assert words[1:] == ["-m", LATE_PROGRAM]
        process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        outer = self

        class Pipe:
            def __enter__(self) -> Pipe:
                return self

            def __exit__(self, *_: object) -> None:
                text, _none = process.communicate(self.text)
                outer.tasks.append(json.loads(text))

            def write(self, data: bytes) -> None:
                self.text = data.decode()

        class Process:
            stdin = Pipe()

            def poll(self) -> int | None:
                return None if outer.running else 0

            def kill(self) -> None:
                outer.running = False

            def wait(self) -> int:
                return 0

        self.calls.append(options)
        return Process()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started()
    monkeypatch.setattr(late_points, "_popen", made)
    monkeypatch.setattr(late_points, "EVERY_S", 0.0)
    return made


def ended_job(engine: Engine, owner: Any, *, ended: bool = True) -> Attempt:
    """An attempt whose job ended a minute ago."""
    spec = factories.spec(resources={"pool": f"{engine.name}-low"})
    run = runs.run_submit(owner=owner, name="late", spec=spec)
    [attempt] = runs.attempts_enqueue(new=[runs.NewAttempt(run, (), None)])
    share = {"node": member_name(engine.name, attempt.pk, 0), "node_rank": 0, "devices": [0]}
    ago = clock.now() - timedelta(minutes=1)
    placement = [{**share, "engine": engine.name}]
    state = "exited" if ended else "running"
    Attempt.objects.filter(pk=attempt.pk).update(
        placement=placement, state=state, ended=ago if ended else None
    )
    EngineJob.objects.create(
        attempt=attempt,
        engine=engine,
        name=f"orrery-{run.pk}-1-a",
        state=EngineJob.State.ENDED if ended else EngineJob.State.ACTIVE,
        ended=ago if ended else None,
    )
    return attempt


def identity(home: Path, engine: Engine, attempt: Attempt) -> str:
    name = member_name(engine.name, attempt.pk, 0)
    (home / IDENTITIES).mkdir(parents=True, exist_ok=True)
    (home / IDENTITIES / f"{name}.json").write_text("{}")
    return name


def add(name: str, **settings: Any) -> Engine:
    engine = engines.engine_add(by=None, name=name, settings=settings)
    pool = {"partition": "low"}
    engines.engine_pool_set(engine=engine, by=None, pool=f"{name}-low", settings=pool)
    return engine


def test_supervisors_of_ended_jobs_that_did_not_report_are_sent_for_once(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, owner = add("hpc", home=str(tmp_path)), factories.user("ada", role="submitter")
    killed, reported, living = (ended_job(engine, owner, ended=one) for one in (True, True, False))
    late = LatePoints()
    late.poll(engine)
    assert not started.tasks, "there is no such folder"
    name = identity(tmp_path, engine, killed)
    identity(tmp_path, engine, living)
    numbers = "other.job1.0", f"hpc.job{10**24 - 1}.0", "hpc.job\u0661.0"
    for other in numbers:  # what a user may write there
        (tmp_path / IDENTITIES / f"{other}.json").write_text("{}")
    late.poll(engine)
    folder = f"runs/{killed.run_id}/attempt-1/node-0"
    assert started.tasks == [{"home": str(tmp_path), "left": [{"node": name, "run_dir": folder}]}]
    assert "user" not in started.calls[0] and reported.pk != killed.pk
    late.poll(engine)
    assert len(started.tasks) == 1, "a failure is repeated later"
    monkeypatch.setattr(late_points, "_AGAIN_S", 0.0)
    started.running = True
    late.poll(engine)
    late.poll(engine)
    assert len(started.tasks) == 2, "one process at a time"
    started.running = False
    late.poll(engine)
    assert len(started.tasks) == 3
    late.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as other users")
def test_a_home_of_a_user_is_read_as_that_user(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = add("hpc", home="$HOME/orrery", identity="submitter")
    ada, bob = (factories.user(name, role="submitter") for name in ("ada", "bob"))
    mine, _ = ended_job(engine, ada), ended_job(engine, bob)
    account = pwd.struct_passwd(("ada", "x", 4242, 4343, "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(late_points.os, "getgrouplist", lambda name, group: [group])

    def getpwnam(name: str) -> pwd.struct_passwd:
        if name != "ada":
            raise KeyError(name)
        return account

    monkeypatch.setattr(late_points.pwd, "getpwnam", getpwnam)
    name = identity(tmp_path / "orrery", engine, mine)
    LatePoints().poll(engine)
    [task], [options] = started.tasks, started.calls
    assert task["home"] == str(tmp_path / "orrery")
    assert [one["node"] for one in task["left"]] == [name]
    assert (options["user"], options["group"], options["extra_groups"]) == (4242, 4343, [4343])
    assert "DATABASE_URL" not in options["env"] and "ORRERY_SECRET_KEY" not in options["env"]


def test_a_program_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for a user who may not execute the control plane's Python."""

    def refuse(*_: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/root/venv/bin/python")

    monkeypatch.setattr(late_points, "_popen", refuse)
    engine, owner = add("hpc", home=str(tmp_path)), factories.user("ada", role="submitter")
    identity(tmp_path, engine, ended_job(engine, owner))
    LatePoints().poll(engine)
    assert f"Nothing is sent from {tmp_path}" in caplog.text and "/root/venv" in caplog.text


def test_a_failure_to_send_leaves_the_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = add("hpc")
    turns = EngineTurns(engine.pk, lambda: True)
    monkeypatch.setattr(turns_module, "sync", lambda *_, **options: True)
    monkeypatch.setattr(turns._late, "poll", lambda row: 1 / 0)
    turns.turn()
    engine.refresh_from_db()
    assert not engine.status.get("down")
    assert 0.0 < turns.due < time.monotonic() + 10
