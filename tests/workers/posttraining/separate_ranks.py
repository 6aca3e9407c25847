"""Runs with separate rollout ranks in this process: one training rank, rollout ranks as threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from tests.workers.training.pool import ended_process_group
from workers.posttraining.reinforcement.roles import run_rank
from workers.runtime.environment import read_environment
from workers.training.setup.spec_loading import accept


def run_separate(spec: dict[str, Any], directory: Path) -> list[Any]:
    """The outcomes of all ranks."""
    run = accept(json.loads(json.dumps(spec)))
    policy = run.train.policy
    assert policy is not None and run.plan.world_size == 1
    size = 1 + policy.rollout.separate_devices
    store, outcomes = HashStore(), [None] * size

    def rank(number: int) -> None:
        env = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
        env["ORRERY_PG_TIMEOUT_S"] = "60"
        environment = read_environment(directory, env=env)
        outcomes[number] = run_rank(run, environment, store)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(1, size)]
    for each in threads:
        each.start()
    with ended_process_group():
        rank(0)
        for each in threads:
            each.join()
    return outcomes
