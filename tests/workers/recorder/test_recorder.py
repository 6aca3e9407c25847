"""The recorder against a real HTTP server: everything arrives once and nothing raises."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flows.embedded import free_port
from tests.workers.recorder.server import TOKEN, Ingest, serving
from workers.contracts import Point, RunEvent, RunSpec
from workers.recorder import orrery_recorder

FILE = Path(orrery_recorder.__file__)
PATIENCE_S = 90.0  # against hangs


def record(server_url: str, **more: object) -> orrery_recorder.Run:
    return orrery_recorder.init(server_url, TOKEN, "flight", **more)  # type: ignore[arg-type]


def test_what_is_logged_arrives_whole_and_in_contract_form(server: Ingest) -> None:
    run = record(server.url, spec={"model": "llama3-8b"}, experiment="e")
    run.log({"loss": 2.5, "lr": 1e-3}, step=1, tokens=64)
    run.log(
        {"loss": math.nan, "flag": True, "odd": object(), "scale": -math.inf}, step=2, tokens=128
    )
    run.log({"loss": 2.0, '100%d "x"': 3})
    run.event("checkpoint_saved", {"step": 2, "loss": math.inf})
    run.line("hello")
    assert run.finish(timeout_s=PATIENCE_S)
    (created,) = server.runs.values()
    assert (created["name"], created["experiment"]) == ("flight", "e")
    assert RunSpec.from_dict(created["spec"]).kind == "external"
    points = server.points("r1")
    assert [(p["seq"], p["step"], p["tokens"]) for p in points] == [
        (1, 1, 64),
        (2, 2, 128),
        (3, 3, 128),
    ]
    assert points[1]["values"] == {"loss": "NaN", "flag": 1.0, "scale": "-Infinity"}
    assert points[2]["values"] == {"loss": 2.0, '100%d "x"': 3.0}
    for point in points:
        Point.from_dict({**point, "run": "r1", "attempt": 1})
    (event,) = server.store["r1"]["events"].values()
    assert RunEvent.from_dict({**event, "run": "r1", "attempt": 1}).data == {
        "step": 2,
        "loss": "Infinity",
    }
    assert [line["text"] for line in server.store["r1"]["logs"].values()] == ["hello"]
    assert server.ends == {"r1": {"status": "finished", "reason": ""}}
    # nothing is left to keep
    assert run.id == "r1" and run.spool is not None and not run.spool.exists()


def test_a_server_that_comes_late_gets_everything_in_few_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    run = record(f"http://127.0.0.1:{port}")
    for step in range(1, 25_001):
        run.log({"loss": 1 / step}, step=step)
    assert run.id is None
    with serving(Ingest(port)) as server:
        assert run.finish(timeout_s=PATIENCE_S)
        assert [p["seq"] for p in server.points("r1")] == list(range(1, 25_001))
        assert len([call for call in server.calls if call[0] == "points"]) <= 5
        assert max(count for _, count in server.calls) <= 10_000
    assert len([r for r in caplog.records if "cannot be reached" in r.getMessage()]) == 1


def test_retry_after_is_honoured_and_busy_answers_lose_nothing(server: Ingest) -> None:
    run = record(server.url)
    assert run.flush(timeout_s=PATIENCE_S)
    server.refuse = [(429, {"Retry-After": "1"})]
    began = time.monotonic()
    run.log({"loss": 1.0}, step=1)
    assert run.flush(timeout_s=PATIENCE_S)
    assert time.monotonic() - began >= 1.0
    server.refuse = [(503, {}), (500, {})]
    run.log({"loss": 1.0}, step=2)
    assert run.finish(timeout_s=PATIENCE_S)
    assert len(server.points("r1")) == 2 and server.duplicates == 0


def test_one_bad_item_does_not_hold_up_the_others(
    server: Ingest, caplog: pytest.LogCaptureFixture
) -> None:
    run = record(server.url)
    for i in range(10):
        run.event("poison" if i == 4 else "fine", {"i": i})
    run.log({"loss": 1.0}, step=1)
    assert run.finish(timeout_s=PATIENCE_S)
    assert [event["data"]["i"] for event in server.store["r1"]["events"].values()] == [
        0,
        1,
        2,
        3,
        5,
        6,
        7,
        8,
        9,
    ]
    assert "left out" in caplog.text


def test_a_refused_field_does_not_cost_the_record(
    server: Ingest, caplog: pytest.LogCaptureFixture
) -> None:
    spec = {"tags": ["mine"], "wrong": 1, "train": {"steps": 5, "strange": "x"}}
    server.unknown = {"wrong", "train.strange"}
    run = record(server.url, spec=spec, experiment="tuning")
    run.log({"loss": 1.0}, step=1)
    assert run.finish(timeout_s=PATIENCE_S)
    sent = server.runs["r1"]
    assert sent["spec"] == {"kind": "external", "tags": ["mine"], "train": {"steps": 5}}
    assert sent["experiment"] == "tuning" and len(server.points("r1")) == 1
    (details,) = server.store["r1"]["details"].values()
    assert details["config"] == {"spec": {"wrong": 1, "train": {"strange": "x"}}}
    assert "wrong is not a field" in caplog.text and "without train.strange, wrong" in caplog.text


def test_a_spec_refused_without_a_field_does_not_cost_the_experiment(server: Ingest) -> None:
    server.unknown = {"elsewhere"}
    run = record(server.url, spec={"elsewhere.": 1}, experiment="tuning")
    assert run.finish(timeout_s=PATIENCE_S)
    assert server.runs["r1"]["spec"] == {"kind": "external"}
    assert server.runs["r1"]["experiment"] == "tuning"
    (details,) = server.store["r1"]["details"].values()
    assert details["config"] == {"spec": {"elsewhere.": 1}}


CRASHING = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import orrery_recorder
run = orrery_recorder.init(sys.argv[2], sys.argv[3], "flight", spool=sys.argv[4])
first = int(sys.argv[5])
for step in range(first, first + 500):
    run.log({"loss": 1.0 / step}, step=step)
if sys.argv[6] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[6] == "raise":
    raise RuntimeError("diverged")
"""


def crash(
    server: Ingest | str, spool: Path, first: int, how: str
) -> subprocess.CompletedProcess[str]:
    url = server if isinstance(server, str) else server.url
    return subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            CRASHING,
            str(FILE.parent),
            url,
            TOKEN,
            str(spool),
            str(first),
            how,
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_a_killed_program_goes_on_with_the_same_run(server: Ingest, tmp_path: Path) -> None:
    assert crash(server, tmp_path / "s", 1, "kill").returncode == -signal.SIGKILL
    with open(tmp_path / "s" / "points.jsonl", "ab") as file:
        file.write(b'\0\0\0\n{"rank":0,"seq":501,"st')  # torn by the crash
    assert crash(server, tmp_path / "s", 501, "end").returncode == 0
    assert list(server.runs) == ["r1"]
    assert [(p["seq"], p["step"]) for p in server.points("r1")] == [(i, i) for i in range(1, 1001)]
    assert server.ends["r1"]["status"] == "finished"
    # it ended: the next one in the same place is a new run
    assert crash(server, tmp_path / "s", 1, "end").returncode == 0
    assert len(server.points("r2")) == 500


def test_an_exception_ends_the_run_as_failed(server: Ingest, tmp_path: Path) -> None:
    crashed = crash(server, tmp_path / "s", 1, "raise")
    assert crashed.returncode == 1 and "diverged" in crashed.stderr
    assert server.ends["r1"] == {"status": "failed", "reason": "RuntimeError: diverged"}
    assert len(server.points("r1")) == 500


def test_what_a_program_left_behind_is_sent_later(tmp_path: Path) -> None:
    port = free_port()
    url, spool = f"http://127.0.0.1:{port}", tmp_path / "s"
    run = record(url, spool=spool)
    run.log({"loss": 1.0}, step=1)
    assert not run.finish(timeout_s=0.1)
    # a new run in the same spool does not mix with the one that waits
    second = record(url, spool=spool)
    second.log({"loss": 2.0}, step=1)
    assert not second.finish(timeout_s=0.1)
    assert TOKEN not in "".join(path.read_text() for path in spool.rglob("*") if path.is_file())
    with serving(Ingest(port)) as server:
        command = [sys.executable, "-I", str(FILE), str(spool), "--token", TOKEN, "--timeout", "90"]
        subprocess.run(command, timeout=180, check=True)
        losses = sorted(server.points(run)[0]["values"]["loss"] for run in server.runs)
        assert losses == [1.0, 2.0] and len(server.ends) == 2


def test_a_spool_is_for_one_process(
    tmp_path: Path, server: Ingest, caplog: pytest.LogCaptureFixture
) -> None:
    with record(server.url, spool=tmp_path / "s") as run:
        other = record(server.url, spool=tmp_path / "s")
        other.log({"loss": 1.0})
        assert other.spool is None and "in use" in caplog.text
        run.log({"loss": 2.0})
    assert [p["values"]["loss"] for p in server.points("r1")] == [2.0]


@pytest.mark.parametrize("status", [401, 404, 422])
def test_nothing_raises_when_the_server_refuses(
    server: Ingest, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse = [(status, {})] * 1000
    run = record(server.url)
    for _ in range(100):
        run.log({"loss": 1.0})
    deadline = time.monotonic() + PATIENCE_S
    while str(status) not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not run.finish(timeout_s=0.5)
    run.log({"loss": 1.0})  # and after the end either
    assert str(status) in caplog.text
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 3


def test_nothing_raises_on_a_wrong_address_or_a_full_spool(
    tmp_path: Path, server: Ingest, caplog: pytest.LogCaptureFixture
) -> None:
    for url in ("", "not an address", "file:///etc"):
        run = orrery_recorder.init(url, TOKEN, "x")
        run.log({"loss": 1.0})
        assert run.finish(timeout_s=PATIENCE_S)
    (tmp_path / "file").write_text("")
    record(server.url, spool=tmp_path / "file" / "below").log({"loss": 1.0})
    full = record(server.url, max_spool_bytes=1000)
    full.event(3, 5)  # type: ignore[arg-type]
    full.event("set", {"of": {1, 2}, 4: b"x"})  # type: ignore[dict-item]
    full.line(None)  # type: ignore[arg-type]
    full.log({"loss": 1.0}, step="x", time="y")  # type: ignore[arg-type]
    full.log(None)  # type: ignore[arg-type]
    for _ in range(100):
        full.log({"loss": 1.0})
    assert full.finish(timeout_s=PATIENCE_S)
    assert 5 < len(server.points(full.id)) < 20
    assert caplog.text.count("is full") == 1


def test_ranks_are_silent_or_share_a_run(server: Ingest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    silent = record(server.url)
    silent.log({"loss": 1.0})
    assert silent.finish(timeout_s=PATIENCE_S) and not server.runs
    server.refuse = [(409, {})]  # both at once: the second gets 409 while the first is in progress
    runs = [record(server.url, key="launch-7", rank=rank) for rank in (0, 1)]
    for rank, run in enumerate(runs):
        run.log({"loss": float(rank)}, step=1)
    assert [run.finish(timeout_s=PATIENCE_S) for run in reversed(runs)] == [True, True]
    assert [(p["rank"], p["values"]["loss"]) for p in server.points("r1")] == [(0, 0.0), (1, 1.0)]


def test_in_a_run_directory_lines_are_the_outbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "ORRERY_RUN_DIR": str(tmp_path),
        "ORRERY_RUN": "12",
        "ORRERY_ATTEMPT": "3",
        "RANK": "2",
    }.items():
        monkeypatch.setenv(name, value)
    for step in (1, 2):  # restarted by torchrun: numbers continue
        run = orrery_recorder.init(name="script")
        run.log({"loss": 1.0 / step}, step=step, tokens=step)
        run.event("note", {"step": step})
        run.line("its output is its log")
        assert run.finish(timeout_s=PATIENCE_S)
    assert capsys.readouterr().out == "its output is its log\n" * 2
    points = [
        Point.model_validate_json(line)
        for line in (tmp_path / "rank-2" / "points.jsonl").read_text().splitlines()
    ]
    assert [(p.run, p.attempt, p.rank, p.seq, p.step) for p in points] == [
        ("12", 3, 2, 1, 1),
        ("12", 3, 2, 2, 2),
    ]
    events = [
        json.loads(line) for line in (tmp_path / "rank-2" / "events.jsonl").read_text().splitlines()
    ]
    assert [RunEvent.from_dict(event).seq for event in events] == [1, 2]


# 3.12 warns of a fork with threads, which is the case
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_speak_for_its_parent(server: Ingest) -> None:
    run = record(server.url)
    run.log({"loss": 1.0}, step=1)
    child = os.fork()
    if child == 0:  # a forked data loader: its log and its end are not the run's
        run.log({"loss": 9.0}, step=2)
        run.finish("failed")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert run.finish(timeout_s=PATIENCE_S)
    assert server.ends["r1"]["status"] == "finished"
    assert [p["step"] for p in server.points("r1")] == [1]
