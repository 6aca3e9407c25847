"""Rewards of answers: rules, the user's functions, and what happens when they fail."""

from __future__ import annotations

import json

import pytest

from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.test_policy_losses import options_of
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore
from workers.posttraining.reinforcement.rewards.rules import last_number
from workers.runtime.exit_codes import UserError


def scores(reward, *answers, expected="42"):
    [built] = build_rewards(options_of(rewards=[reward]))
    try:
        results = built.score(
            [AnswerToScore("6 * 7 =", text, expected, "line 1") for text in answers]
        )
        return [each.failure or each.value for each in results]
    finally:
        built.close()


def test_rules():
    assert scores({"kind": "exact"}, " 42\n", "42.0", "") == [1, 0, 0]
    assert scores({"kind": "number"}, "It is 41, no: 42.0", "forty-two", "42 or 43") == [1, 0, 0]
    assert scores({"kind": "number", "tolerance": 1}, "43", "43.5") == [1, 0]
    assert scores({"kind": "regex", "pattern": r"<b>\d+</b>"}, "so <b>42</b>", "42") == [1, 0]
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    answers = ('{"b": 1, "a": 2}', '{"a": "2"}', "{", "[" * 100_000)
    assert scores({"kind": "json_schema", "schema": schema}, *answers) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("costs 1,234.50 €", 1234.5),
        ("1,2,3", 3),
        ("-3", -3),
        (".5", 0.5),
        ("1e3 m", 1000),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


FUNCTIONS = """
import os, time
print("loaded")

def lengths(prompts, answers, expected):
    print("called")
    return [len(each) for each in answers]

def hang(**_):
    time.sleep(600)

def crash(**_):
    os._exit(3)

def error(**_):
    raise ValueError("no idea")

def text(answers, **_):
    return ["good"] * len(answers)

def nan(answers, **_):
    return [float("nan")] * len(answers)

def short(answers, **_):
    return [1.0]

def number(**_):
    return 1.0
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


def test_a_python_function(functions):
    reward = {"kind": "python", "path": functions, "function": "lengths"}
    assert scores(reward, "a", "bcd") == [1, 3]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("hang", "gave no result within 0.5 s"),
        ("crash", "ended its process"),
        ("error", "raised ValueError: no idea"),
        ("text", "returned str 'good', not a number"),
        ("nan", "returned nan"),
        ("short", "returned 1 numbers for 2 answers"),
        ("number", "returned float, not a list of numbers"),
    ],
)
def test_a_function_that_fails_gives_no_reward(functions, function, message):
    reward = {"kind": "python", "path": functions, "function": function, "timeout_s": 0.5}
    [built] = build_rewards(options_of(rewards=[reward]))
    try:
        answers = [AnswerToScore("p", "a", None, "line 1")] * 2
        for _ in range(2):  # a new process replaces one that ended
            assert all(message in each.failure for each in built.score(answers))
    finally:
        built.close()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"kind": "python", "path": "/nowhere/f.py"}, "is not a file on this node"),
        ({"kind": "python", "path": "FILE", "function": "nothing"}, "has no function nothing"),
        ({"kind": "json_schema", "schema": {"type": 3}}, "the schema is invalid"),
    ],
)
def test_rewards_that_cannot_be_built_are_refused(functions, reward, message):
    if reward.get("path") == "FILE":
        reward = {**reward, "path": functions}
    with pytest.raises(UserError, match=message):
        build_rewards(options_of(rewards=[reward]))


def policy_spec(tmp_path, lines, **grpo):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"group_size": 2, "prompts_per_step": 2, "rollout": {"max_new_tokens": 4}, **grpo}
    model = {"name": "t", "layers": 1, "hidden": 16, "heads": 2, "ffn": 32}
    return {
        "kind": "train",
        "model": {**model, "vocab": 256, "max_seq_len": 16},
        "plan": {"global_batch_size": 4},
        "data": {"path": str(path), "format": "prompt_completion"},
        "train": {"objective": "grpo", "steps": 2, "seq_len": 8, "grpo": options},
    }


LINES = [{"prompt": "ab", "answer": "c"}, {"prompt": "de", "answer": "f"}]


def test_a_judge_reads_the_answer_as_text(monkeypatch):
    """Names in braces within an answer are not replaced; a judge that came back is asked again."""
    from workers.posttraining.produce.client import Reply, ServerLost

    url = "http://127.0.0.1:9/v1"
    prompt = "Q: {prompt} A: {answer} Right: {expected}"
    reward = {"kind": "judge", "url": url, "model": "m", "prompt": prompt}
    [built] = build_rewards(options_of(rewards=[reward]))
    seen = []

    def complete(messages, sampling):
        if built.client.lost:
            raise ServerLost(built.client.lost)
        seen.append(messages[0]["content"])
        return Reply("8 of 10" if len(seen) < 3 else "great")

    monkeypatch.setattr(built.client, "complete", complete)
    answer = AnswerToScore("{answer}", "{expected}", "42", "line 1")
    built.client.lost = "it gave no answer"
    assert [each.value for each in built.score([answer, answer])] == [0.8, 0.8]
    assert seen[0] == "Q: {answer} A: {expected} Right: 42"
    assert "gave no number" in built.score([answer])[0].failure
    built.close()


@pytest.mark.ranks
def test_an_iteration_without_any_reward_ends_the_run(tmp_path, functions):
    rewards = [{"kind": "python", "path": functions, "function": "nan"}]
    made = policy_spec(tmp_path, LINES, rewards=rewards, on_reward_error="skip")
    [outcome] = run_policy(None, made, tmp_path / "run").outcomes
    assert outcome["class"] == "user_error" and outcome["step"] == 0
    assert "no answer of an iteration has a reward" in outcome["reason"]


@pytest.mark.ranks
def test_a_failed_reward_ends_the_run_and_names_the_prompt(tmp_path, functions):
    rewards = [{"kind": "python", "path": functions, "function": "error"}]
    made = policy_spec(tmp_path, LINES, rewards=rewards)
    [outcome] = run_policy(None, made, tmp_path / "run").outcomes
    assert outcome["class"] == "user_error"
    assert "raised ValueError: no idea (the prompt of" in outcome["reason"]
    assert ": line " in outcome["reason"] and "on_reward_error to skip" in outcome["reason"]


@pytest.mark.ranks
def test_answers_without_a_reward_are_left_out_if_requested(tmp_path, functions):
    source = "calls = []\ndef reward(answers, **_):\n    calls.append(1)\n"
    source += "    return [None if len(calls) == 1 and i == 0 else float(i) for i in "
    source += "range(len(answers))]\n"
    path = tmp_path / "reward.py"
    path.write_text(source)
    rewards = [{"kind": "python", "path": str(path)}]
    made = policy_spec(tmp_path, LINES, rewards=rewards, on_reward_error="skip")
    result = run_policy(None, made, tmp_path / "run")
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert result.values("reward/failed") == [1, 0]
    # an answer without a reward is not trained on; the other of its group learns nothing
    tokens = result.values("trained_tokens")
    log = (tmp_path / "run/rank-0/rollouts.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in log]
    assert tokens[0] == sum(len(each["token_ids"]) for each in rollouts[1:4])
    assert rollouts[0]["failure"].startswith("python: returned NoneType") or (
        "not a number" in rollouts[0]["failure"]
    )
    assert rollouts[0]["advantage"] == rollouts[1]["advantage"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "ab"}, "line 1: has no field prompt"),
        ({"prompt": "ab"}, "line 1: has no answer, which a reward compares with"),
        ({"prompt": "", "answer": "b"}, "line 1: the prompt is empty"),
        ({"prompt": "a" * 9, "answer": "b"}, "line 1: the prompt has 9 tokens, 5 leave room"),
        ({"prompt": "a", "answer": True}, "line 1: answer is 'True'"),
    ],
)
def test_lines_that_are_no_prompts_are_listed(tmp_path, line, message):
    made = policy_spec(tmp_path, [line, *LINES], rewards=[{"kind": "exact"}])
    [outcome] = run_policy(None, made, tmp_path / "run").outcomes
    assert outcome["class"] == "user_error" and message in outcome["reason"]


@pytest.mark.ranks
def test_a_reward_model_scores_the_last_token(tmp_path):
    """Trained by this engine; policies with another head or a longer context are refused."""
    import torch

    from tests.workers.training.pool import train_alone
    from workers.models.decoder import Decoder
    from workers.models.weights.open import open_weights
    from workers.models.weights.reader import fill_model

    pairs = [{"prompt": p, "chosen": p * 2, "rejected": "x"} for p in ("ab", "cd", "ef", "gh")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    made = policy_spec(tmp_path, LINES, rewards=[{"kind": "exact"}])
    made["data"] = {"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}
    made["plan"] = {"global_batch_size": 2}
    checkpoint = {"every_steps": 1, "async": False}
    made["train"] = {"objective": "reward", "steps": 1, "seq_len": 16, "checkpoint": checkpoint}
    trained = train_alone(made, tmp_path / "reward")
    assert trained.outcomes[0]["class"] == "ok", trained.outcomes
    folder = tmp_path / "reward" / "checkpoints" / "step-00000001"

    rewards = [{"kind": "model", "path": str(folder), "weight": 2.0}]
    policy = policy_spec(tmp_path, LINES, rewards=rewards)
    policy["train"]["checkpoint"] = checkpoint
    result = run_policy(None, policy, tmp_path / "run")
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    weights = open_weights(folder)
    decoder = Decoder(weights.spec).eval()
    fill_model(decoder, weights)
    for line in (tmp_path / "run/rank-0/rollouts.jsonl").read_text().splitlines():
        each = json.loads(line)
        ids = torch.tensor([each["prompt_ids"] + each["token_ids"]])
        with torch.no_grad():
            expected = float(decoder(ids)[0, -1, 0])
        assert each["rewards"]["model"] == pytest.approx(expected, abs=1e-5)
        assert each["reward"] == pytest.approx(2 * expected, abs=1e-5)

    wrong = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    refused = policy_spec(tmp_path, LINES, rewards=[{"kind": "model", "path": wrong}])
    [outcome] = run_policy(None, refused, tmp_path / "refused").outcomes
    assert outcome["class"] == "user_error" and "predicts tokens" in outcome["reason"]
