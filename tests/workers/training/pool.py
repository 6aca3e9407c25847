"""A pool of training ranks that stay alive over many runs: starting torch's process groups costs seconds each time.

Run as a module it is one rank: jobs come in as JSON lines, outcomes go out. `Pool` is the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300


@dataclass
class Result:
    """What a run left behind: outcomes, points and events by rank."""

    outcomes: list[dict[str, Any]]
    directory: Path

    def points(self, rank: int = 0) -> list[dict[str, Any]]:
        return read_lines(self.directory / f"rank-{rank}" / "points.jsonl")

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        return read_lines(self.directory / f"rank-{rank}" / "events.jsonl")

    def values(self, name: str, rank: int = 0) -> list[float]:
        return [point["values"][name] for point in self.points(rank) if name in point["values"]]


class Pool:
    def __init__(self, size: int, rendezvous: Path) -> None:
        self.size = size
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": "256",
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(size),
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "tests.workers.training.pool", str(rendezvous)],
                cwd=ROOT,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def train(self, spec: dict[str, Any], directory: Path, **more: str) -> Result:
        """Run `spec` on all ranks; `more` are environment variables of the run."""
        return Result(self._ask({"spec": spec, "directory": str(directory), "env": more}), directory)

    def call(self, function: str, **given: Any) -> list[Any]:
        """What `package.module:name` returns on each rank, as JSON; fails with the first rank's traceback."""
        answers = self._ask({"call": function, "given": given})
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, errors[0]
        return [answer["returns"] for answer in answers]

    def _ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(job) + "\n")
            rank.stdin.flush()
        hung = threading.Timer(TIMEOUT_S, self.abort)
        hung.start()
        answers = [json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout is not None]
        hung.cancel()
        return answers

    def abort(self) -> None:
        """On a hang: every rank says where its threads stand, then ends."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGABRT)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def train_alone(spec: dict[str, Any], directory: Path, **more: str) -> Result:
    """Run `spec` in this process, and leave it without the group of one that checkpoints start."""
    import torch.distributed as dist

    try:
        return Result([_run(spec, directory, more)], directory)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run(spec: dict[str, Any], directory: Path, more: dict[str, str]) -> dict[str, Any]:
    from workers.training.accept import accept
    from workers.training.attempt import run_attempt
    from workers.training.environment import check_world, read_environment

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = read_environment(directory, env={**{k: os.environ[k] for k in names if k in os.environ}, **more})
    run = accept(spec)
    check_world(run.plan, environment)
    outcome = run_attempt(run, environment)
    return {"class": outcome.exit_class, "reason": outcome.reason, "step": outcome.step}


def _called(function: str, given: dict[str, Any]) -> dict[str, Any]:
    module, name = function.split(":")
    try:
        return {"returns": getattr(importlib.import_module(module), name)(**given)}
    except Exception:
        traceback.print_exc()  # at once: the other ranks may wait for this one until they are ended
        return {"error": traceback.format_exc()}


def _serve() -> None:
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
    answers, sys.stdout = sys.stdout, sys.stderr  # what the engine says is not an answer
    for line in sys.stdin:
        job = json.loads(line)
        if "call" in job:
            answer = _called(job["call"], job["given"])
        else:
            answer = _run(job["spec"], Path(job["directory"]), job["env"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
