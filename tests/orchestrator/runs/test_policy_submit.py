"""Reinforcement learning at submit: prompts, paths of rewards, batch and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runs.submission.absolute_paths import with_absolute_paths
from orchestrator.runs.submission.data_paths import path_problems
from workers.contracts import RunSpec
from workers.contracts.specs.run import spec_problems
from workers.contracts.specs.training_support import engine_problems


def document(folder: Path, *, plan: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    grpo = {"rewards": [{"kind": "exact"}], "rollout": {"max_new_tokens": 16}}
    return {
        "kind": "train",
        "model": "llama-tiny",
        "data": {"path": str(folder / "prompts.jsonl"), "format": "prompt_completion"},
        "plan": plan or {"global_batch_size": 128},
        "train": {"objective": "grpo", "steps": 1, "seq_len": 64, "grpo": grpo, **train},
    }


def problems(folder: Path, lines: list[Any], **options: Any) -> list[str]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text(text)
    spec = RunSpec.from_dict(document(folder, **options))
    refused = [
        *path_problems(spec, data_roots=[folder], run_root=folder),
        *engine_problems(spec),
        *spec_problems(spec),
    ]
    return [str(each) for each in refused]


GOOD = {"prompt": "2+2=", "answer": 4}
CHAT = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": "4"}


def test_prompts_with_answers_are_accepted(tmp_path: Path) -> None:
    assert problems(tmp_path, [GOOD, CHAT]) == []


def test_prompts_need_answers_only_for_rewards_that_compare(tmp_path: Path) -> None:
    line = {"prompt": "Write a haiku."}
    [problem] = problems(tmp_path, [GOOD, line])
    assert "prompts.jsonl, line 2: has no answer, which a reward compares with" in problem
    rewards = [{"kind": "regex", "pattern": r"\n.*\n"}]
    grpo = {"rewards": rewards, "rollout": {"max_new_tokens": 16}}
    assert problems(tmp_path, [GOOD, line], grpo=grpo) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": {"global_batch_size": 64}}, "an update learns from 128 answers"),
        (
            {"plan": {"global_batch_size": 128, "pp": 2, "schedule": "pipedream"}},
            "pipedream updates between micro-batches",
        ),
        ({"seq_len": 16}, "answers of 16 tokens leave no room for a prompt"),
        (
            {"grpo": {"rewards": [{"kind": "python", "path": "r.py", "timeout_s": 900}]}},
            "counts as hanging",
        ),
        ({"eval": {}}, "held-out prompts are not evaluated"),
        (
            {"adapter": {"method": "prefix", "rank": 4}, "init_from": {"package": "x"}},
            "into which prefix is not merged",
        ),
        (
            {
                "plan": {"global_batch_size": 128, "tp": 2},
                "adapter": {"method": "qlora"},
                "init_from": {"package": "x"},
            },
            "tp 2 splits those in 4 bits",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert any(message in each for each in problems(tmp_path, [GOOD], **options))


@pytest.mark.parametrize(
    ("grpo", "message"),
    [
        ({"rewards": []}, "at least 1"),
        ({"rewards": [{"kind": "exact"}, {"kind": "exact"}]}, "two rewards are named exact"),
        ({"rewards": [{"kind": "regex", "pattern": "("}]}, "is not a valid regular expression"),
        ({"rewards": [{"kind": "exact"}], "minibatches": 3}, "do not divide into 3 minibatches"),
        ({"rewards": [{"kind": "exact"}], "staleness": {"max": 1}}, "need a correction"),
        (
            {
                "rewards": [{"kind": "exact"}],
                "rollout": {"top_p": 0.9},
                "staleness": {"correction": "truncated"},
            },
            "top_p changes the sampler's distribution",
        ),
        (
            {"rewards": [{"kind": "exact"}], "kl": {"target": 0.1}},
            "kl.target has no effect because kl.coef is 0",
        ),
        (
            {"rewards": [{"kind": "judge", "url": "http://a/v1", "model": "m", "prompt": "Rate"}]},
            "does not show the answer",
        ),
    ],
)
def test_options_that_contradict_are_refused(
    tmp_path: Path, grpo: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RunSpec.from_dict(document(tmp_path, grpo=grpo))


def test_the_path_of_a_python_reward_is_below_a_data_root(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(**_): return []")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(GOOD) + "\n")
    grpo = {"rewards": [{"kind": "python", "path": "reward.py"}, {"kind": "exact"}]}
    made = with_absolute_paths(document(tmp_path, grpo=grpo), data_roots=[tmp_path])
    assert made["train"]["grpo"]["rewards"][0]["path"] == str(tmp_path / "reward.py")
    spec = RunSpec.from_dict(made)
    assert path_problems(spec, data_roots=[tmp_path], run_root=tmp_path) == []
    outside = RunSpec.from_dict(
        document(tmp_path, grpo={"rewards": [{"kind": "python", "path": "/etc/passwd"}]})
    )
    [problem] = path_problems(outside, data_roots=[tmp_path], run_root=tmp_path)
    assert problem.field == "train.grpo.rewards.0.path" and "allowed folders" in problem.message
