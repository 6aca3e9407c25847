"""A pool of training ranks that stay alive over many runs: starting torch's process groups costs
seconds each time.

A rank is forked from a process that has loaded torch and the engine once for all; jobs come in as
plain data, outcomes
go out. `Pool` is the other end. Between jobs the ranks are stopped: each of gloo's threads wakes up
100 times a second, used or not.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.workers.training.rank_imports"])
        self.ranks, self.lines = [], []
        atexit.register(self.close)  # a stopped rank would not end with this process
        for rank in range(size):
            ours, theirs = context.Pipe()
            given = (rank, size, str(rendezvous), theirs)
            self.ranks.append(
                context.Process(
                    target=_serve, args=given, daemon=True, name=f"rank {rank} of {size}"
                )
            )
            self.ranks[-1].start()
            theirs.close()
            self.lines.append(ours)

    @property
    def whole(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def train(self, spec: dict[str, Any], directory: Path, **more: str) -> Result:
        """Run `spec` on all ranks; `more` are environment variables of the run."""
        return Result(
            self._request({"spec": spec, "directory": str(directory), "env": more}), directory
        )

    def call(self, function: str, **given: Any) -> list[Any]:
        """What `package.module:name` returns on each rank, as JSON; fails with the first rank's
        traceback.
        """
        answers = self._request({"call": function, "given": given})
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, errors[0]
        return [answer["returns"] for answer in answers]

    def _request(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        output = json.dumps(job)
        self._signal(signal.SIGCONT)
        for line in self.lines:
            line.send(output)
        hung = threading.Timer(TIMEOUT_S, self.abort)
        hung.start()
        try:
            answers = [json.loads(line.recv()) for line in self.lines]
        finally:
            hung.cancel()
        self._signal(signal.SIGSTOP)
        return answers

    def abort(self) -> None:
        """On a hang: every rank says where its threads stand, then ends."""
        self._signal(signal.SIGABRT)

    def _signal(self, number: int) -> None:
        for rank in self.ranks:
            if rank.is_alive():
                os.kill(rank.pid or 0, number)

    def close(self) -> None:
        atexit.unregister(self.close)
        for rank in self.ranks:
            rank.kill()
        for rank, line in zip(self.ranks, self.lines, strict=True):
            rank.join()
            line.close()


def train_alone(spec: dict[str, Any], directory: Path, **more: str) -> Result:
    """Run `spec` in this process."""
    with ended_process_group():
        return Result([_run(spec, directory, more)], directory)


@contextmanager
def ended_process_group() -> Iterator[None]:
    """Afterwards ends the process group of one that checkpoints start."""
    import torch.distributed as dist

    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run(spec: dict[str, Any], directory: Path, more: dict[str, str]) -> dict[str, Any]:
    from workers.runtime.environment import check_world, read_environment
    from workers.training.setup.attempt import run_attempt
    from workers.training.setup.spec_loading import accept

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = read_environment(
        directory, env={**{k: os.environ[k] for k in names if k in os.environ}, **more}
    )
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


def _serve(rank: int, size: int, rendezvous: str, line: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.workers.training import rank_imports  # noqa: F401  (fails if it was not preloaded)
    from workers.launcher.processes import die_with_parent
    from workers.training.loop import text_samples

    die_with_parent()  # also a stopped rank ends with the process that forked it
    faulthandler.enable()
    # texts are compared: on a busy machine they take as long as they take
    text_samples.GRACE_S = TIMEOUT_S
    os.chdir(ROOT)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "256", "GLOO_SOCKET_IFNAME": "lo"}
    )
    torch.set_num_threads(1)
    sys.stdout = sys.stderr
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    while True:
        try:
            job = json.loads(line.recv())
        except EOFError:  # the requesting process has exited
            os._exit(0)
        if "call" in job:
            answer = _called(job["call"], job["given"])
        else:
            try:
                answer = _run(job["spec"], Path(job["directory"]), job["env"])
            except Exception as error:  # a spec that is refused, on every rank alike
                answer = {
                    "class": "refused",
                    "reason": f"{type(error).__name__}: {error}",
                    "step": 0,
                }
        line.send(json.dumps(answer))
