"""A pool of training ranks that stay alive over many runs: starting torch's process groups costs seconds each time.

Run as a module it is one rank: jobs come in as JSON lines, outcomes go out. `Pool` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120


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
        common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size)}
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
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"spec": spec, "directory": str(directory), "env": more}) + "\n")
            rank.stdin.flush()
        hung = threading.Timer(TIMEOUT_S, self.abort)
        hung.start()
        outcomes = [json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout is not None]
        hung.cancel()
        return Result(outcomes, directory)

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


def _serve() -> None:
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
    answers, sys.stdout = sys.stdout, sys.stderr  # what the engine says is not an answer
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_run(job["spec"], Path(job["directory"]), job["env"])), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
