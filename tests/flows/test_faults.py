"""`kill -9` of one process at a time during a run: no second start, no lost or duplicate point."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.embedded import Orrery, lives, train_spec
from tests.flows.gate import submitted

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]


def attempts(orrery: Orrery, run: str) -> list[dict[str, Any]]:
    return sorted(
        orrery.get(f"runs/{run}/attempts")["items"], key=lambda attempt: attempt["attempt"]
    )


def pid_in(path: Path) -> int:
    return int(json.loads(path.read_text())["pid"])


def heard_of(orrery: Orrery) -> str:
    return str(orrery.get("nodes")["items"][0]["last_heartbeat"])


def explained(orrery: Orrery, run: str) -> list[tuple[str, str]]:
    """Transitions as `(state, why)`; each starts at the previous state and has a reason."""
    moves = [
        event["data"]
        for event in orrery.events(run, "state_changed")
        if event["data"]["of"] == "run"
    ]
    assert all(before["new"] == after["old"] for before, after in pairwise(moves)), moves
    assert all(move["why"] for move in moves), moves
    return [(move["new"], move["why"]) for move in moves]


def stored(orrery: Orrery, run: str, **params: Any) -> list[tuple[int, int]]:
    """`(seq, step)` of every stored point of `loss`, none left out, from the raw CSV."""
    assert orrery.client is not None
    request = {"name": "loss", "raw": 1, **params}
    answer = orrery.client.get(f"runs/{run}/series", params=request, headers={"Accept": "text/csv"})
    head, *lines = answer.text.splitlines()
    assert head == "attempt,rank,seq,step,tokens,time,value"
    return [(int(line.split(",")[2]), int(line.split(",")[3])) for line in lines]


def whole(orrery: Orrery, run: str, steps: int) -> None:
    """Every rank has every step once, and numbers per attempt have no gap and no duplicate."""
    orrery.until_reported(run)
    for rank in (0, 1):
        assert [step for _, step in stored(orrery, run, rank=rank)] == list(range(1, steps + 1)), (
            f"rank {rank}"
        )
        for attempt in attempts(orrery, run):
            own = stored(orrery, run, rank=rank, attempt=attempt["attempt"])
            first = own[0][1]
            assert own == [(n, first + n - 1) for n in range(1, len(own) + 1)], (
                f"rank {rank} of {attempt['attempt']}"
            )


def test_killed_processes_only_delay_a_run(orrery: Orrery) -> None:
    """Kill each process once during a run: steps continue, and all points arrive in between."""
    with submitted(orrery, train_spec(steps=200, every=50), name="every part is killed") as (
        run,
        gate,
    ):
        step = gate.to(20)
        orrery.until_step(run, step)
        supervisor = pid_in(orrery.folder(run) / "supervisor.json")
        parts = ["web", "scheduler", "ingest", "agent"]
        # the broker last: who takes new work at the end has been killed, or has lost it, or both
        for part in [*random.sample(parts, len(parts)), "valkey"]:
            killed = orrery.pid_of(part)
            os.kill(killed, signal.SIGKILL)
            # without it; and no further, however long it takes to come back
            step = gate.to(step + 20)
            orrery.until(
                lambda part=part, killed=killed: orrery.pid_of(part) != killed,
                120,
                f"another {part}",
            )
            orrery.until_step(run, step)
            since = heard_of(orrery)
            orrery.until(
                lambda since=since: heard_of(orrery) > since,
                120,
                f"the node is heard of, after {part}",
            )
            assert orrery.state(run) == "running", f"{part}: {explained(orrery, run)}"
        gate.open()
        ended = orrery.until_state(run, "finished", "failed", "cancelled", "queued")
    assert ended == "finished", explained(orrery, run)
    assert [attempt["exit_class"] for attempt in attempts(orrery, run)] == ["ok"]
    assert [state for state, _ in explained(orrery, run)] == [
        "queued",
        "starting",
        "running",
        "finished",
    ]
    whole(orrery, run, 200)
    assert orrery.written(run) == 200, "the attempt started once"
    assert pid_in(orrery.folder(run) / "supervisor.json") == supervisor, "under one supervisor"
    after = orrery.submit(
        {"kind": "script", "script": {"command": ["--no-python", "true"]}}, name="new work"
    )
    assert orrery.until_state(after, "finished", "failed") == "finished"


def test_killed_attempts_continue_from_their_checkpoint_and_start_once(orrery: Orrery) -> None:
    """A rank, then a supervisor; while the next attempt starts, who gave the order for it, then who
    claimed it.
    """
    spec = train_spec(steps=120, every=20)
    with submitted(orrery, spec, attempts=3, name="every attempt is killed") as (run, gate):
        orrery.until_step(run, gate.to(45))
        ended = [psutil.Process(pid) for pid in orrery.ranks_of(run)]
        ended[1].kill()
        gate.until(
            lambda: (orrery.folder(run, 2) / "order.json").exists(), "the second order is claimed"
        )
        os.kill(orrery.pid_of("scheduler"), signal.SIGKILL)
        orrery.until_step(run, gate.to(85, attempt=2))
        ended += [psutil.Process(pid) for pid in orrery.ranks_of(run, 2)]
        os.kill(pid_in(orrery.folder(run, 2) / "supervisor.json"), signal.SIGKILL)
        # before its supervisor lives, the agent's death would be the attempt's
        gate.until(
            lambda: (orrery.folder(run, 3) / "supervisor.json").exists(),
            "the third attempt has begun",
        )
        os.kill(orrery.pid_of("agent"), signal.SIGKILL)
        gate.open()
        assert orrery.until_state(run, "finished", "failed", "cancelled") == "finished", explained(
            orrery, run
        )

    first, second, third = attempts(orrery, run)
    assert [each["exit_class"] for each in (first, second, third)] == [
        "infrastructure",
        "infrastructure",
        "ok",
    ]
    assert "SIGKILL" in first["exit"]["reason"] and "supervisor" in second["exit"]["reason"]
    assert not any(map(lives, ended)), "no rank of an earlier attempt lives on"
    result = explained(orrery, run)
    again = ["queued", "starting", "running"]
    assert [state for state, _ in result] == [*again, *again, *again, "finished"]
    for number, attempt in ((1, first), (2, second)):
        assert (
            f"retry {number} of 5" in result[3 * number][1]
            and attempt["exit"]["reason"] in result[3 * number][1]
        )

    whole(orrery, run, 120)
    events = orrery.events(run)
    gone = [
        e["data"]["signal"]
        for e in events
        if e["type"] == "rank_exited" and (e["attempt"], e["rank"]) == (1, 1)
    ]
    assert gone == ["SIGKILL"]
    for number, attempt, least in ((1, second, 40), (2, third, 80)):
        saved = [
            e["data"]["step"]
            for e in events
            if e["type"] == "checkpoint_saved" and e["attempt"] == number
        ]
        restored = [
            e for e in events if e["type"] == "checkpoint_restored" and e["attempt"] == number + 1
        ]
        assert {e["data"]["step"] for e in restored} == {max(saved)}
        assert attempt["resume_from"]["step"] == max(saved) >= least
        for rank in (0, 1):
            assert stored(orrery, run, rank=rank, attempt=number + 1)[0] == (1, max(saved) + 1)


def spoiled(orrery: Orrery, spec: dict[str, Any], spoil: Callable[[str], object]) -> str:
    """Submits while the node is drained, so that the run's place on disk can be spoiled before it
    is used.
    """
    assert orrery.client is not None
    node = orrery.get("nodes")["items"][0]["id"]
    assert orrery.client.post(f"nodes/{node}/drain").is_success
    run = orrery.submit(spec)
    spoil(run)
    assert orrery.client.post(f"nodes/{node}/undrain").is_success
    return run


def test_a_run_directory_that_cannot_be_made_ends_every_attempt_with_a_clear_reason(
    orrery: Orrery,
) -> None:
    """A file where the folder should be: tests may run as root, which may write everywhere else."""

    def a_file(run: str) -> None:
        (orrery.home / "runs").mkdir(exist_ok=True)
        (orrery.home / "runs" / run).write_text("not a folder")

    run = spoiled(orrery, train_spec(steps=5, retries={"infrastructure": 1}), a_file)
    assert orrery.until_state(run, "failed", "finished") == "failed"
    assert [attempt["exit_class"] for attempt in attempts(orrery, run)] == ["infrastructure"] * 2
    result = orrery.get(f"runs/{run}")["exit"]
    assert result["class"] == "infrastructure"
    assert f"runs/{run}/attempt-2" in result["reason"] and "cannot be used" in result["reason"], (
        result
    )


@pytest.fixture
def tiny_disk() -> Iterator[Callable[[Path], None]]:
    """Mounts a file system of 300 kB at a folder, until the test ends."""
    mounted: list[Path] = []

    def mount(place: Path) -> None:
        place.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=300k", "tiny", str(place)], capture_output=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_ends_the_attempt_with_a_clear_reason(
    orrery: Orrery, tiny_disk: Callable[[Path], None]
) -> None:
    spec = train_spec(steps=5000, retries={"infrastructure": 0})
    run = spoiled(orrery, spec, lambda run: tiny_disk(orrery.folder(run)))
    assert orrery.until_state(run, "failed", "finished") == "failed"
    result = orrery.get(f"runs/{run}")["exit"]
    assert result["class"] == "infrastructure" and "No space left on device" in result["reason"], (
        result
    )
    for rank in (0, 1):
        orrery.until(
            lambda rank=rank: orrery.steps(run, rank=rank),
            60,
            "the points before the full disk are reported",
        )
        steps = orrery.steps(run, rank=rank)
        assert steps and steps == list(range(1, steps[-1] + 1)), (
            "the points before the full disk are reported without a gap"
        )
