"""50 updates on recorded rollouts equal TRL 1.16's, without TRL.

`python -m tests.bench.bench_grpo_trl --write` makes the golden curve.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.grpo_job import GROUP, STEPS, prompt_lines, recorded_spec
from tests.workers.posttraining.policy_ranks import run_policy
from workers.posttraining.reinforcement.rollouts import Rollout, RolloutFiles
from workers.posttraining.reinforcement.sampling.run_texts import (
    open_chat,
    read_run_prompts,
    rollout_digest,
)
from workers.training.setup.spec_loading import accept

GOLDEN = Path(__file__).parent / "golden" / "grpo_trl.json"


def test_losses_and_gradient_norms_equal_those_of_trl(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in prompt_lines()))
    made = recorded_spec(str(path))
    store(golden["rollouts"], made, tmp_path / "run" / "checkpoints")
    result = run_policy(None, made, tmp_path / "run")
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    restored = [each for each in result.events() if each["type"] == "rollouts_restored"]
    assert len(restored) == STEPS
    assert result.values("reward/mean") == pytest.approx(golden["reward"])
    for name in ("loss", "grad_norm"):
        assert result.values(name) == pytest.approx(golden[name], abs=1e-4), name
    assert max(golden["grad_norm"]) > 0.3


def store(steps, made, checkpoints):
    """The recorded rollouts as stored iterations, with the advantages of Dr. GRPO."""
    run = accept(made)
    prompts = read_run_prompts(run, open_chat(run, checkpoints), checkpoints)
    files = RolloutFiles(checkpoints / "rollouts", digest=rollout_digest(run, prompts))
    for number, rows in enumerate(steps):
        rollouts = []
        for at, row in enumerate(rows):
            first = at // GROUP * GROUP
            mean = sum(each["reward"] for each in rows[first : first + GROUP]) / GROUP
            advantage = row["reward"] - mean
            rewards = {"regex": row["reward"]}
            extra = {"weight_version": number, "rewards": rewards, "advantage": advantage}
            rollouts.append(Rollout(step=number + 1, **row, **extra))
        state = {"next_position": 0, "kl_coef": 0.0, "next_kl_coef": 0.0}
        files.write(number, rollouts, state)
