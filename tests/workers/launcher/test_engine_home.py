"""The home of an engine: what a job does there next to its supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.launcher.harness import ROOT
from workers.contracts.wire.maintenance.storage import CollectOrder, StorageReport
from workers.contracts.wire.node_messages import LaunchOrder, LeftSupervisor
from workers.launcher.cluster_engines import job
from workers.launcher.maintenance import engine_home
from workers.launcher.rundir import RunDir, write_json


def leave(home: Path, name: str, run: int, *, reported: bool) -> LeftSupervisor:
    """What a supervisor leaves: its folder and its identity."""
    left = LeftSupervisor(node=name, run_dir=f"runs/{run}/attempt-1/node-0")
    folder, file = RunDir(home / left.run_dir), engine_home.node_file(home, name)
    folder.path.mkdir(parents=True)
    file.parent.mkdir(exist_ok=True)
    write_json(folder.order, {"fence": name})
    write_json(folder.exit, {"class": "ok", "reported": reported})
    write_json(file, {"node": name})
    return left


def order(left: list[LeftSupervisor], collect: CollectOrder | None = None) -> LaunchOrder:
    """A launch order with these tasks."""
    return LaunchOrder.model_construct(left=left, collect=collect)


def test_deletions_come_first_and_a_failure_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    done: list[str] = []

    def recover(run_dir: RunDir, file: Path, **patience: float) -> dict[str, Any]:
        done.append(file.stem)
        if file.stem == "hpc.job1.0":
            raise RuntimeError("torn outbox")
        return {}

    def send(report: StorageReport) -> bool:
        done.append("collected")
        return True

    monkeypatch.setattr(engine_home, "recover", recover)
    left = [leave(tmp_path, f"hpc.job{n}.0", n, reported=False) for n in (1, 2)]
    engine_home.maintain(tmp_path, order(left, CollectOrder(scan=True)), send)
    assert done == ["collected", "hpc.job1.0", "hpc.job2.0"]
    assert "torn outbox" in capsys.readouterr().out
    monkeypatch.setattr(engine_home, "_TOTAL_S", 0.0)
    engine_home.maintain(tmp_path, order(left), send)
    assert len(done) == 3, "the time for all has passed"


def test_a_supervisor_that_has_reported_everything_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still live: a recovery would kill its processes."""
    monkeypatch.setattr(engine_home, "recover", lambda *_, **__: pytest.fail("recovered"))
    left = leave(tmp_path, "hpc.job1.0", 1, reported=True)
    engine_home._ship(tmp_path, left, 1.0)
    assert not engine_home.node_file(tmp_path, left.node).exists()


@pytest.mark.parametrize("reported", [True, False])
def test_a_job_leaves_its_identity_to_the_next_one_unless_all_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    left = leave(tmp_path, "hpc.job1.0", 1, reported=reported)
    folder, file = RunDir(tmp_path / left.run_dir), engine_home.node_file(tmp_path, left.node)
    folder.order.unlink()
    launch = LaunchOrder.model_construct(run_dir=left.run_dir)
    member = job.JobMember(name=left.node, secret="00" * 32, redis="redis://127.0.0.1:1")
    ticket = job.JobTicket(home=str(tmp_path), members=[member])
    monkeypatch.setenv(job.names.ENGINE_TICKET, ticket.to_text())
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(job, "launch_order", lambda *_: launch)
    monkeypatch.setattr(job, "_claim", lambda *_: None)
    monkeypatch.setattr(job, "placed", lambda given, *_: given)
    monkeypatch.setattr(job, "own_address", lambda _: "")
    monkeypatch.setattr(job, "_supervise", lambda *_: None)
    monkeypatch.setattr(LaunchOrder, "to_dict", lambda _: {})
    assert job.main() == 0
    assert file.exists() is not reported


def test_an_attempt_that_writes_nothing_for_days_stays_active(tmp_path: Path) -> None:
    left = leave(tmp_path, "hpc.job1.0", 7, reported=False)
    run_dir, path = RunDir(tmp_path / left.run_dir), "runs/7/checkpoints/step_5"
    (tmp_path / path).mkdir(parents=True)
    os.utime(run_dir.path, (1.0, 1.0))
    client: Any = SimpleNamespace(get=lambda key: None)
    member = job.JobMember(name=left.node, secret="00" * 32, redis="redis://127.0.0.1:1")
    turns = iter([False, True])
    job._pass_requests(client, member, run_dir, lambda: next(turns))
    reports: list[StorageReport] = []

    def send(report: StorageReport) -> bool:
        reports.append(report)
        return True

    engine_home.maintain(tmp_path, order([], CollectOrder(checkpoints=[path])), send)
    assert "active" in reports[0].collected[0].problem and (tmp_path / path).is_dir()
    os.utime(run_dir.path, (1.0, 1.0))  # its job was killed
    engine_home.maintain(tmp_path, order([], CollectOrder(checkpoints=[path])), send)
    assert not (tmp_path / path).exists()


def test_jobs_that_waited_during_an_upgrade_start_under_the_old_name() -> None:
    command = [sys.executable, "-m", "workers.launcher.engines.job"]
    environ = {key: value for key, value in os.environ.items() if key != job.names.ENGINE_TICKET}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and job.names.ENGINE_TICKET in done.stdout, done.stderr
