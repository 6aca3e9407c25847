"""A reward model is trained, served, and scores the answers of a PPO run that waited for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.flows.embedded import TINY, Orrery

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]

PAIRS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no"} for n in range(8)]


def tuned(objective: str, data: str, format: str, **train: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": TINY,
        "data": {"path": data, "format": format},
        "plan": {"micro_batch_size": 4, "global_batch_size": 4},
        "train": {"objective": objective, "seq_len": 32, **train},
    }


def write(orrery: Orrery, name: str, lines: list[dict[str, str]]) -> None:
    (orrery.home / "data").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (orrery.home / "data" / name).write_text(text)


def test_a_served_reward_model_scores_the_answers_of_a_ppo_run(orrery: Orrery) -> None:
    assert orrery.client is not None
    write(orrery, "pairs.jsonl", PAIRS)
    write(orrery, "prompts.jsonl", [{"prompt": each["prompt"], "answer": "1"} for each in PAIRS])
    scorer = orrery.submit(
        tuned("reward", "pairs.jsonl", "preference", steps=4, checkpoint={"every_steps": 4})
    )
    assert orrery.until_state(scorer, "finished", "failed") == "finished"
    model = {"path": f"runs/{scorer}"}
    served = orrery.submit({"kind": "serve", "model": model, "serve": {"kv_blocks": 32}})
    # submitted while the server still starts
    ppo = {
        "reward_model": {"run": int(served)},
        "rewards": [{"kind": "exact", "weight": 0.0}],
        "value": {"init_from": model},
        "rollout": {"max_new_tokens": 4},
    }
    policy = orrery.submit(tuned("ppo", "prompts.jsonl", "prompt_completion", steps=3, ppo=ppo))
    assert orrery.until_state(policy, "finished", "failed") == "finished", orrery.last_lines()
    orrery.until_reported(policy)
    assert orrery.steps(policy, "reward/reward_model") == [1, 2, 3]
    # the server has the scores of the run's answers
    written = orrery.folder(policy) / "rank-0" / "rollouts.jsonl"
    answer = json.loads(written.read_text().splitlines()[0])
    score = orrery.client.post(
        f"{orrery.url}/serve/{served}/v1/pooling",
        json={"input": [[*answer["prompt_ids"], *answer["token_ids"]]]},
    ).json()
    assert score["data"][0]["data"][0] == pytest.approx(answer["rewards"]["reward_model"], abs=1e-4)
    uses = {(edge["source"], edge["use"]) for edge in orrery.get(f"runs/{policy}/lineage")["edges"]}
    assert {(f"run:{served}", "reward_model"), (f"run:{scorer}", "value_model")} <= uses
