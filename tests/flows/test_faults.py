"""`kill -9` in the middle of a run, one part at a time: no second start, no point lost or doubled, all explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.embedded import Orrery, train_spec

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def orrery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orrery]:
    server = Orrery(tmp_path_factory.mktemp("faults") / "home", devices=2)
    server.start()
    yield server
    server.close()


def folder(orrery: Orrery, run: str, attempt: int = 1) -> Path:
    return orrery.home / "runs" / run / f"attempt-{attempt}"


def attempts(orrery: Orrery, run: str) -> list[dict[str, Any]]:
    return sorted(orrery.get(f"runs/{run}/attempts")["items"], key=lambda attempt: attempt["attempt"])


def pid_in(path: Path) -> int:
    return int(json.loads(path.read_text())["pid"])


def explained(orrery: Orrery, run: str) -> list[tuple[str, str]]:
    """The run's moves as `(state, why)`; each begins where the one before ended and has a reason."""
    events = orrery.get(f"runs/{run}/events", type="state_changed", limit=200)["items"]
    moves = [event["data"] for event in events if event["data"]["of"] == "run"]
    assert all(before["new"] == after["old"] for before, after in pairwise(moves)), moves
    assert all(move["why"] for move in moves), moves
    return [(move["new"], move["why"]) for move in moves]


def stored(orrery: Orrery, run: str, **params: Any) -> list[tuple[int, int]]:
    """`(seq, step)` of every stored point of `loss`, none left out, from the raw CSV."""
    assert orrery.client is not None
    asked = {"name": "loss", "raw": 1, **params}
    answer = orrery.client.get(f"runs/{run}/series", params=asked, headers={"Accept": "text/csv"})
    head, *lines = answer.text.splitlines()
    assert head == "attempt,rank,seq,step,tokens,time,value"
    return [(int(line.split(",")[2]), int(line.split(",")[3])) for line in lines]


def whole(orrery: Orrery, run: str, steps: int) -> None:
    """Every rank has every step once, and every attempt's own numbers have neither gap nor double."""
    for rank in (0, 1):
        assert [step for _, step in stored(orrery, run, rank=rank)] == list(range(1, steps + 1)), f"rank {rank}"
        for attempt in attempts(orrery, run):
            own = stored(orrery, run, rank=rank, attempt=attempt["attempt"])
            first = own[0][1]
            assert own == [(n, first + n - 1) for n in range(1, len(own) + 1)], f"rank {rank} of {attempt['attempt']}"


@pytest.mark.parametrize("part", ["web", "scheduler", "ingest", "agent", "valkey"])
def test_a_killed_part_delays_a_run_and_nothing_else(orrery: Orrery, part: str) -> None:
    run = orrery.submit(train_spec(steps=300, every=50), name=f"kill {part}")
    orrery.until_step(run, 20)
    supervisor, killed = pid_in(folder(orrery, run) / "supervisor.json"), orrery.pid_of(part)
    os.kill(killed, signal.SIGKILL)
    assert orrery.until_state(run, "finished", "failed", "cancelled", "queued") == "finished", explained(orrery, run)
    assert [attempt["exit_class"] for attempt in attempts(orrery, run)] == ["ok"]
    assert [state for state, _ in explained(orrery, run)] == ["queued", "starting", "running", "finished"]
    whole(orrery, run, 300)
    points = [line for line in (folder(orrery, run) / "rank-0" / "points.jsonl").read_text().splitlines() if line]
    assert len(points) == 300, "the attempt started once"
    assert pid_in(folder(orrery, run) / "supervisor.json") == supervisor, "under one supervisor"
    orrery.until(lambda: orrery.pid_of(part) != killed, 30, f"another {part}")
    if part in ("scheduler", "agent", "valkey"):  # it takes new work, and so do those that had lost it
        after = orrery.submit({"kind": "script", "script": {"command": ["--no-python", "true"]}}, name=f"after {part}")
        assert orrery.until_state(after, "finished", "failed") == "finished"


@pytest.mark.parametrize("part", ["scheduler", "agent"])
def test_a_part_killed_while_an_attempt_starts_does_not_start_it_twice(orrery: Orrery, part: str) -> None:
    run = orrery.submit(train_spec(steps=60), name=f"start without {part}")
    orrery.until(lambda: (folder(orrery, run) / "order.json").exists(), 30, "the order is claimed")
    os.kill(orrery.pid_of(part), signal.SIGKILL)
    assert orrery.until_state(run, "finished", "failed", "cancelled", "queued") == "finished", explained(orrery, run)
    assert [attempt["exit_class"] for attempt in attempts(orrery, run)] == ["ok"]
    whole(orrery, run, 60)


@pytest.mark.parametrize("part", ["supervisor", "rank"])
def test_a_killed_attempt_goes_on_from_its_checkpoint(orrery: Orrery, part: str) -> None:
    run = orrery.submit(train_spec(steps=300, every=20), name=f"kill {part}")
    orrery.until_step(run, 45)
    ranks = [pid_in(folder(orrery, run) / f"rank-{rank}/process.json") for rank in (0, 1)]
    os.kill(pid_in(folder(orrery, run) / "supervisor.json") if part == "supervisor" else ranks[1], signal.SIGKILL)
    assert orrery.until_state(run, "finished", "failed", "cancelled") == "finished", explained(orrery, run)
    first, second = attempts(orrery, run)
    assert (first["exit_class"], second["exit_class"]) == ("infrastructure", "ok")
    assert ("SIGKILL" if part == "rank" else "supervisor") in first["exit"]["reason"]
    assert not any(psutil.pid_exists(pid) for pid in ranks), "no rank of the first attempt lives on"
    told = explained(orrery, run)
    again = ["queued", "starting", "running"]
    assert [state for state, _ in told] == [*again, *again, "finished"]
    assert "retry 1 of 5" in told[3][1] and first["exit"]["reason"] in told[3][1]

    events = orrery.get(f"runs/{run}/events", limit=200)["items"]
    saved = [e["data"]["step"] for e in events if e["type"] == "checkpoint_saved" and e["attempt"] == 1]
    assert {e["data"]["step"] for e in events if e["type"] == "checkpoint_restored"} == {max(saved)}
    assert second["resume_from"]["step"] == max(saved) >= 40
    if part == "rank":
        gone = [e["data"]["signal"] for e in events if e["type"] == "rank_exited" and e["rank"] == 1]
        assert gone == ["SIGKILL"]
    for rank in (0, 1):
        assert stored(orrery, run, rank=rank, attempt=2)[0] == (1, max(saved) + 1)
    whole(orrery, run, 300)


def spoiled(orrery: Orrery, spec: dict[str, Any], spoil: Callable[[str], object]) -> str:
    """Submits while the node is drained, so that the run's place on disk can be spoiled before it is used."""
    assert orrery.client is not None
    node = orrery.get("nodes")["items"][0]["id"]
    assert orrery.client.post(f"nodes/{node}/drain").is_success
    run = orrery.submit(spec)
    spoil(run)
    assert orrery.client.post(f"nodes/{node}/undrain").is_success
    return run


def test_a_run_directory_that_cannot_be_made_ends_every_attempt_with_a_clear_reason(orrery: Orrery) -> None:
    """A file where the folder should be: tests may run as root, which may write everywhere else."""

    def a_file(run: str) -> None:
        (orrery.home / "runs").mkdir(exist_ok=True)
        (orrery.home / "runs" / run).write_text("not a folder")

    run = spoiled(orrery, train_spec(steps=5, retries={"infrastructure": 1}), a_file)
    assert orrery.until_state(run, "failed", "finished") == "failed"
    assert [attempt["exit_class"] for attempt in attempts(orrery, run)] == ["infrastructure"] * 2
    told = orrery.get(f"runs/{run}")["exit"]
    assert told["class"] == "infrastructure"
    assert f"runs/{run}/attempt-2" in told["reason"] and "cannot be used" in told["reason"], told


@pytest.fixture
def tiny_disk() -> Iterator[Callable[[Path], None]]:
    """Mounts a file system of 300 kB at a folder, until the test ends."""
    mounted: list[Path] = []

    def mount(place: Path) -> None:
        place.mkdir(parents=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tiny", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_ends_the_attempt_with_a_clear_reason(orrery: Orrery, tiny_disk: Callable[[Path], None]) -> None:
    spec = train_spec(steps=5000, retries={"infrastructure": 0})
    run = spoiled(orrery, spec, lambda run: tiny_disk(folder(orrery, run)))
    assert orrery.until_state(run, "failed", "finished") == "failed"
    told = orrery.get(f"runs/{run}")["exit"]
    assert told["class"] == "infrastructure" and "No space left on device" in told["reason"], told
    for rank in (0, 1):
        steps = orrery.steps(run, rank=rank)
        assert steps and steps == list(range(1, steps[-1] + 1)), "what there was room for is told without a gap"
