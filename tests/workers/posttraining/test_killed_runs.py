"""kill -9 of any process of a policy optimization run: no rollout comes twice, and none is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.test_policy_runs import prompts, spec

__all__ = ["prompts"]
pytestmark = pytest.mark.ranks
HANG_S = 120
MANY = 100_000  # steps of an attempt that is killed
CHECKPOINT = {"every_steps": 3, "async": False, "keep": 2}
ASYNCHRONOUS = {
    "rollout": {"max_new_tokens": 6, "sync": "separate", "devices": 1},
    "staleness": {"max": 2, "correction": "truncated"},
}


def serve_rank(given: dict, directory: str, rank: int, size: int, port: int) -> None:
    """One rank of a run in this process, as torchrun starts it."""
    from workers.posttraining.reinforcement.roles import run_rank
    from workers.runtime.environment import read_environment
    from workers.training.setup.spec_loading import accept

    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "ORRERY_PG_TIMEOUT_S": 60}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in env.items()})
    run_rank(accept(given), read_environment(Path(directory)))


class Attempts:
    """Attempts of one run, each as processes of its own."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.ranks = directory, ranks
        self.context = multiprocessing.get_context("forkserver")
        loaded = ["tests.workers.training.rank_imports", "workers.posttraining.reinforcement.roles"]
        self.context.set_forkserver_preload(loaded)

    def start(self, given: dict) -> list:
        """The processes of an attempt."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [
            self.context.Process(
                target=serve_rank, args=(given, str(self.directory), rank, self.ranks, port)
            )
            for rank in range(self.ranks)
        ]
        for each in processes:
            each.start()
        return processes

    def killed(
        self, given: dict, *, at: int, rank: int, ready: Callable[[], Any] = lambda: True
    ) -> None:
        """An attempt whose `rank` is killed after step `at`, when it is `ready`; torchrun ends the
        others.
        """
        processes = self.start(given)
        end = time.monotonic() + HANG_S
        while self.steps()[-1:] < [at] or not ready():
            assert time.monotonic() < end and processes[0].is_alive(), self.steps()
            time.sleep(0.002)
        os.kill(processes[rank].pid, signal.SIGKILL)
        for each in processes:
            each.kill()
            each.join(HANG_S)

    def finished(self, given: dict) -> None:
        """An attempt that runs to its end."""
        for each in self.start(given):
            each.join(HANG_S)
            assert each.exitcode == 0

    def points(self) -> list[dict]:
        """All complete points of rank 0."""
        path = self.directory / "rank-0" / "points.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        """Their steps."""
        return [each["step"] for each in self.points()]

    def rollouts(self) -> list[dict]:
        """All rollouts that were learned from."""
        lines = (self.directory / "rank-0" / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def learned(self) -> list[tuple]:
        """Step, prompt and number of each of them."""
        return [(each["step"], each["prompt_id"], each["sample"]) for each in self.rollouts()]

    def repeated_differently(self) -> set[int]:
        """Steps that two attempts computed with different results."""
        seen: dict[int, tuple] = {}
        different = set()
        for each in self.points():
            values = tuple(each["values"][name] for name in ("loss", "grad_norm", "reward/mean"))
            if seen.setdefault(each["step"], values) != values:
                different.add(each["step"])
        return different


def test_a_synchronous_run_continues_as_if_it_had_not_been_killed(pools, prompts, tmp_path):
    attempts = Attempts(tmp_path / "killed", ranks=1)
    given = spec(prompts, steps=MANY, checkpoint=CHECKPOINT)
    attempts.killed(given, at=4, rank=0)
    attempts.killed(given, at=8, rank=0)
    last = attempts.steps()[-1] + 3
    whole = spec(prompts, steps=last, checkpoint=CHECKPOINT)
    attempts.finished(whole)
    one = run_policy(pools, whole, tmp_path / "whole")
    expected = Attempts(one.directory, ranks=1)
    assert attempts.learned() == expected.learned()
    ours = {each["step"]: each["values"]["loss"] for each in attempts.points()}
    assert [ours[step] for step in range(1, last + 1)] == one.values("loss")
    assert attempts.repeated_differently() == set()


def test_an_asynchronous_run_loses_no_rollout_whichever_process_dies(pools, prompts, tmp_path):
    attempts = Attempts(tmp_path / "killed", ranks=2)
    given = spec(prompts, grpo=ASYNCHRONOUS, steps=MANY, checkpoint=CHECKPOINT)
    groups = tmp_path / "killed/checkpoints/rollouts/groups"
    # finished groups wait on disk, which the next attempt learns from
    attempts.killed(given, at=4, rank=1, ready=lambda: list(groups.glob("group-*.json")))
    attempts.killed(given, at=8, rank=0)
    last = attempts.steps()[-1] + 4
    attempts.finished(spec(prompts, grpo=ASYNCHRONOUS, steps=last, checkpoint=CHECKPOINT))
    # the prompts of a synchronous run that was never killed
    one = run_policy(pools, spec(prompts, steps=last), tmp_path / "whole")
    assert attempts.learned() == Attempts(one.directory, ranks=1).learned()
    assert Counter(each[0] for each in attempts.learned()) == dict.fromkeys(range(1, last + 1), 8)
    assert attempts.repeated_differently() == set()
    for each in attempts.rollouts():
        oldest = min(each.get("token_versions") or [each["weight_version"]])
        assert 0 <= each["step"] - 1 - oldest <= 2
