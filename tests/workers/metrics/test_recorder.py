"""Lines that are contracts, whole or absent, at a cost that a training step does not feel."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers.contracts.wire.points import Point, RunEvent
from workers.metrics.recorder import FLUSH_S, Recorder, RecorderError

ROOT = Path(__file__).parents[3]


def recorder(folder, attempt=1):
    return Recorder(folder, run="r", attempt=attempt, rank=2)


def points(folder):
    return [
        Point.from_dict(json.loads(line))
        for line in (folder / "points.jsonl").read_text().splitlines()
    ]


def test_lines_are_contracts(tmp_path):
    with_numbers = recorder(tmp_path)
    for step in (1, 2):
        with_numbers.point(
            step=step, tokens=step * 10, values={"loss": 1.5 / step, "grad_norm": math.nan}
        )
    with_numbers.event("checkpoint_saved", step=2, path="p", best=math.inf)
    with_numbers.close()
    result = points(tmp_path)
    assert [(p.run, p.attempt, p.rank, p.seq, p.step, p.tokens) for p in result] == [
        ("r", 1, 2, 1, 1, 10),
        ("r", 1, 2, 2, 2, 20),
    ]
    assert result[1].values["loss"] == 0.75
    assert math.isnan(result[1].values["grad_norm"])
    event = RunEvent.from_dict(json.loads((tmp_path / "events.jsonl").read_text()))
    assert (event.seq, event.rank, event.type, event.data["best"]) == (
        1,
        2,
        "checkpoint_saved",
        "Infinity",
    )
    assert abs(event.time - time.time()) < 60


def test_a_line_arrives_while_training_goes_on(tmp_path):
    writing = recorder(tmp_path)
    writing.point(step=1, tokens=1, values={"loss": 1.0})
    deadline = time.monotonic() + 30
    while (
        not (tmp_path / "points.jsonl").read_text().endswith("\n") and time.monotonic() < deadline
    ):
        time.sleep(FLUSH_S)
    assert len(points(tmp_path)) == 1
    writing.close()


def test_an_unfinished_line_of_a_killed_predecessor_is_cut(tmp_path):
    first = recorder(tmp_path)
    first.point(step=1, tokens=1, values={"loss": 1.0})
    first.close()
    with open(tmp_path / "points.jsonl", "a") as file:
        file.write('{"run":"r","attempt":1,' + "x" * 200_000)
    second = recorder(tmp_path, attempt=2)
    second.point(step=2, tokens=2, values={"loss": 0.5})
    second.close()
    assert [(p.attempt, p.seq) for p in points(tmp_path)] == [(1, 1), (2, 1)]


def test_kill_leaves_whole_lines(tmp_path):
    code = f"""
from pathlib import Path
from workers.metrics.recorder import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), run="r", attempt=1, rank=0)
for step in range(1, 10**9):
    recorder.point(step=step, tokens=step, values={{f"m{{i}}": step / 7 for i in range(30)}})
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        file = tmp_path / "points.jsonl"
        deadline = time.monotonic() + 60
        while (
            not (file.exists() and file.stat().st_size > 1_000_000) and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    recorder(tmp_path, attempt=2).close()
    result = points(tmp_path)
    assert [p.seq for p in result] == list(range(1, len(result) + 1))


def test_a_full_disk_is_reported(tmp_path):
    (tmp_path / "points.jsonl").symlink_to("/dev/full")
    writing = recorder(tmp_path)
    writing.point(step=1, tokens=1, values={"loss": 1.0})
    with pytest.raises(RecorderError, match="No space left"):
        writing.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RecorderError, match="cannot be written"):
        recorder(tmp_path / "rank-0")


def test_a_file_in_place_of_the_directory_is_reported(tmp_path):
    (tmp_path / "rank-0").write_text("")
    with pytest.raises(RecorderError, match="cannot be written"):
        recorder(tmp_path / "rank-0")


def test_a_close_between_two_looks_is_seen(tmp_path):
    """The writer had looked for a close, found none, and cleared the wake-up that came with it: it
    slept forever.
    """
    recorder = Recorder(tmp_path, run="r", attempt=1, rank=0)

    class Late(threading.Event):
        def wait(self, timeout=None):
            result = super().is_set()
            self.set()
            recorder._wake.set()
            return result

    recorder._closing = Late()
    recorder.event("last")
    recorder._thread.join(20)
    assert not recorder._thread.is_alive()
    recorder.close()
    assert json.loads((tmp_path / "events.jsonl").read_text())["type"] == "last"
