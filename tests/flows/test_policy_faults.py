"""`kill -9` of a rollout rank of a run under the control plane: it continues, and no rollout is
repeated or lost.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.flows.embedded import Orrery
from tests.flows.test_faults import attempts

pytestmark = [pytest.mark.flow, pytest.mark.timeout(600)]
STEPS = 120
MODEL = {
    "name": "tiny",
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "ffn": 64,
    "vocab": 256,
    "max_seq_len": 32,
}


def policy_spec(path: str) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": MODEL,
        "plan": {"micro_batch_size": 8, "global_batch_size": 8},
        "data": {"path": path, "format": "prompt_completion"},
        "train": {
            "objective": "grpo",
            "steps": STEPS,
            "seq_len": 16,
            "checkpoint": {"every_steps": 10},
            "grpo": {
                "group_size": 4,
                "prompts_per_step": 2,
                "rewards": [{"kind": "regex", "pattern": "[0-9a-z]"}],
                "rollout": {"max_new_tokens": 6, "sync": "separate", "devices": 1},
                "staleness": {"max": 2, "correction": "truncated"},
            },
        },
    }


def test_a_killed_rollout_rank_loses_no_rollout(orrery: Orrery) -> None:
    data = orrery.home / "data"
    data.mkdir(exist_ok=True)
    lines = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]
    path = data / "policy-prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = orrery.submit(policy_spec(str(path)), name="a rollout rank is killed")
    orrery.until_step(run, 12)
    _, rollout_rank = orrery.ranks_of(run)
    os.kill(rollout_rank, signal.SIGKILL)
    assert orrery.until_state(run, "finished", "failed", "cancelled") == "finished"
    first, last = attempts(orrery, run)
    assert (first["exit_class"], last["exit_class"]) == ("infrastructure", "ok")
    wanted = list(range(1, STEPS + 1))
    orrery.until(lambda: orrery.steps(run, rank=0) == wanted, 60, "each step is reported once")
    learned: dict[tuple[int, int, int], list[int]] = {}
    for attempt in (1, 2):
        log = orrery.folder(run, attempt) / "rank-0" / "rollouts.jsonl"
        for line in log.read_text().splitlines():
            each = json.loads(line)
            key = (each["step"], each["prompt_id"], each["sample"])
            # a step after the last checkpoint is repeated with the same rollouts
            assert learned.setdefault(key, each["token_ids"]) == each["token_ids"], key
    per_step = [sum(step == each for step, _, _ in learned) for each in wanted]
    assert per_step == [8] * STEPS
