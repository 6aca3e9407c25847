"""Deleting what ended runs left: only below runs/, never of an active attempt, twice harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.contracts.wire.maintenance.storage import Collected, CollectOrder
from workers.launcher.maintenance import garbage
from workers.launcher.rundir import write_json


def attempt(home: Path, run: str, *, reported: bool = True) -> Path:
    """An attempt's folder with 10 bytes of log, and one checkpoint of 100 bytes for the run."""
    folder = home / "runs" / run / "attempt-1"
    (folder / "rank-0").mkdir(parents=True)
    write_json(folder / "order.json", {"fence": run})
    (folder / "rank-0" / "stdout.log").write_bytes(b"x" * 10)
    write_json(folder / "exit.json", {"class": "ok", "reported": reported})
    saved = home / "runs" / run / "checkpoints" / "step_5"
    saved.mkdir(parents=True)
    (saved / "weights").write_bytes(b"y" * 100)
    return folder


def run_order(home: Path, **order: object) -> list[Collected]:
    [report] = garbage.collect(home, CollectOrder.from_dict(order))
    return report.collected


def test_a_checkpoint_is_deleted_once(tmp_path: Path) -> None:
    attempt(tmp_path, "7")
    path = "runs/7/checkpoints/step_5"
    assert run_order(tmp_path, checkpoints=[path]) == [Collected(path=path, bytes=100)]
    assert run_order(tmp_path, checkpoints=[path]) == [Collected(path=path, bytes=0)]
    assert (tmp_path / "runs/7/attempt-1/rank-0").is_dir()


def test_an_attempt_folder_loses_all_but_its_checkpoints(tmp_path: Path) -> None:
    folder = attempt(tmp_path, "7")
    part = folder / "checkpoints" / "step_9"
    part.mkdir(parents=True)
    [item] = run_order(tmp_path, attempts=["runs/7/attempt-1"])
    assert item.problem == "" and item.bytes > 10
    assert [entry.name for entry in folder.iterdir()] == ["checkpoints"] and part.is_dir()
    attempt(tmp_path, "8")
    run_order(tmp_path, attempts=["runs/8/attempt-1"])
    assert not (tmp_path / "runs/8/attempt-1").exists()
    assert (tmp_path / "runs/8/checkpoints/step_5/weights").exists()


@pytest.mark.parametrize(
    "path", ["../etc", "/etc", "runs/../other", "runs/7", "else/7/checkpoints", "runs/link/x"]
)
def test_other_paths_are_refused(tmp_path: Path, path: str) -> None:
    attempt(tmp_path, "7")
    (tmp_path / "outside" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    [item] = run_order(tmp_path, checkpoints=[path])
    assert "runs/" in item.problem or "link" in item.problem
    assert (tmp_path / "outside" / "x").is_dir() and (tmp_path / "runs" / "7").is_dir()


def test_an_active_run_and_a_folder_that_is_no_attempt_stay(tmp_path: Path) -> None:
    attempt(tmp_path, "7", reported=False)
    attempt(tmp_path, "8")
    (tmp_path / "runs/8/mine").mkdir()
    items = run_order(tmp_path, checkpoints=["runs/7/checkpoints/step_5"], attempts=["runs/8/mine"])
    assert "active" in items[0].problem and "not an attempt" in items[1].problem
    assert (tmp_path / "runs/7/checkpoints/step_5").is_dir()


def test_a_scan_reports_every_run_folder(tmp_path: Path) -> None:
    assert [report.runs for report in garbage.collect(tmp_path, CollectOrder(scan=True))] == [[]]
    attempt(tmp_path, "7")
    (tmp_path / "runs/stray").mkdir()
    [report] = garbage.collect(tmp_path, CollectOrder(scan=True))
    assert report.runs is not None and report.first
    assert [(item.name, item.bytes > 110) for item in report.runs] == [
        ("7", True),
        ("stray", False),
    ]
    before = dict(report.runs[0].attempts)
    part = tmp_path / "runs/7/attempt-1/checkpoints/step_9"
    part.mkdir(parents=True)
    (part / "weights").write_bytes(b"x" * 5000)
    [report] = garbage.collect(tmp_path, CollectOrder(scan=True))
    assert report.runs is not None and report.runs[0].attempts == before
    [item] = run_order(tmp_path, attempts=["runs/7/attempt-1"])
    assert {"attempt-1": item.bytes} == before, "a dry run shows what a deletion frees"
