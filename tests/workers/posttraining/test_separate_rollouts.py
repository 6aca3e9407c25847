"""Rollouts on ranks of their own: equal to colocated ones, bounded in age, exact per token."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.separate_ranks import run_separate
from tests.workers.posttraining.test_policy_runs import TINY, spec
from tests.workers.posttraining.test_ppo_runs import spec as ppo_spec
from workers.contracts.specs.finetuning.reinforcement import RolloutSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model
from workers.posttraining.reinforcement.sampling.sampler import AnswerEngine
from workers.runtime.exit_codes import UserError
from workers.training.setup.spec_loading import accept

PROMPT = list(range(1, 34))  # two blocks and a token
STALE = {
    "rollout": {"max_new_tokens": 6, "sync": "separate", "devices": 2},
    "staleness": {"max": 2, "correction": "decoupled"},
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def logged(directory):
    lines = (directory / "rank-0" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values(directory, name, rank=0):
    lines = (directory / f"rank-{rank}" / "points.jsonl").read_text().splitlines()
    return [json.loads(line)["values"].get(name) for line in lines]


def test_synchronous_separate_rollouts_equal_colocated_ones(pools, prompts, tmp_path):
    one = run_policy(pools, spec(prompts), tmp_path / "colocated")
    separate = spec(prompts, grpo={"rollout": STALE["rollout"]})
    outcomes = run_separate(separate, tmp_path / "separate")
    assert {each.exit_class for each in outcomes} == {"ok"}, outcomes
    ours, theirs = logged(one.directory), logged(tmp_path / "separate")
    for name in ("token_ids", "prompt_id", "sample", "reward", "weight_version", "step"):
        assert [each[name] for each in theirs] == [each[name] for each in ours], name
    assert values(tmp_path / "separate", "loss") == pytest.approx(one.values("loss"), abs=1e-6)
    assert values(tmp_path / "separate", "staleness") == [0.0] * 4


def test_answers_are_no_older_than_allowed_and_every_token_is_of_its_weights(prompts, tmp_path):
    """The log-probability of each token is that of the checkpoint of its version."""
    checkpoint = {"every_steps": 1, "keep": 20, "async": False}
    run = spec(prompts, grpo=STALE, steps=8, checkpoint=checkpoint)
    outcomes = run_separate(run, tmp_path)
    assert {each.exit_class for each in outcomes} == {"ok"}, outcomes
    rollouts = logged(tmp_path)
    # each prompt of the order once, in the order of a synchronous run
    assert Counter(each["step"] for each in rollouts) == dict.fromkeys(range(1, 9), 8)
    ages = []
    for each in rollouts:
        versions = each.get("token_versions") or [each["weight_version"]] * len(each["token_ids"])
        ages += [each["step"] - 1 - version for version in versions]
        assert versions == sorted(versions)
        for version in set(versions) - {0}:
            exact = token_logprobs(tmp_path, version, each)
            for at, mine in enumerate(versions):
                if mine == version:
                    assert each["logprobs"][at] == pytest.approx(exact[at], abs=1e-5)
    assert max(ages) == 2 and min(ages) >= 0
    assert values(tmp_path, "staleness/longest")[2:] == [2.0] * 6
    assert values(tmp_path, "mismatch/kl")[-1] > 0
    # the rollout rank's time of each iteration, next to what training waits for
    assert min(values(tmp_path, "generation_s")) > 0
    assert min(values(tmp_path, "generation_wait_s")) >= 0
    # a rollout rank reports at each version that it receives
    assert [each for each in values(tmp_path, "inference/tokens_per_s", rank=1)]


_models: dict[tuple[str, int], Decoder] = {}


@torch.no_grad()
def token_logprobs(directory, version, rollout):
    key = (str(directory), version)
    if key not in _models:
        model = Decoder(ModelSpec(**TINY))
        fill_model(model, open_weights(directory / "checkpoints" / f"step-{version:08d}"))
        _models[key] = model.eval()
    ids = [*rollout["prompt_ids"], *rollout["token_ids"]]
    logp = _models[key](torch.tensor([ids]))[0].float().log_softmax(-1)
    first = len(rollout["prompt_ids"]) - 1
    return [logp[first + at, token].item() for at, token in enumerate(rollout["token_ids"])]


@torch.no_grad()
def test_new_weights_continue_an_answer_and_find_no_cached_prefix_of_old_ones():
    model = ModelSpec(**{**TINY, "max_seq_len": 64})
    torch.manual_seed(0)
    first, second = Decoder(model), Decoder(model)
    for each in (*first.parameters(), *second.parameters()):
        torch.nn.init.normal_(each, std=0.3)
    decoder = Decoder(model).requires_grad_(False).eval()
    engine = AnswerEngine(decoder, RolloutSpec(max_new_tokens=9), [], longest=60)
    decoder.load_state_dict(first.state_dict())
    engine.take_weights(1)
    engine.reserve(2, 2)
    engine.add(PROMPT, 5, answers=2)
    for _ in range(4):
        engine.step()
    decoder.load_state_dict(second.state_dict())
    engine.take_weights(2)
    done = {}
    while engine.busy:
        done |= engine.step()
    [answers] = done.values()
    for answer in answers:
        assert answer.versions == [1] * 4 + [2] * 5
        ids = torch.tensor([[*PROMPT, *answer.token_ids]])
        exact = {1: first(ids), 2: second(ids)}
        for at, (token, version) in enumerate(zip(answer.token_ids, answer.versions, strict=True)):
            row = exact[version][0, len(PROMPT) - 1 + at].float().log_softmax(-1)
            assert answer.logprobs[at] == pytest.approx(row[token].item(), abs=1e-5)
    # the prompt's blocks are found again with the same weights, and with no others
    counts = engine._engine.counts
    before = counts.cached_tokens
    engine.sample([(PROMPT, 1)], answers=2, on_step=lambda: None)
    assert counts.cached_tokens - before == 32
    decoder.load_state_dict(first.state_dict())
    engine.take_weights(3)
    engine.sample([(PROMPT, 1)], answers=2, on_step=lambda: None)
    assert counts.cached_tokens - before == 32


def test_ppo_and_dapo_learn_from_separate_rollouts(prompts, tmp_path):
    dapo = spec(prompts, grpo={**STALE, "algorithm": "dapo"}, steps=3)
    ppo = ppo_spec(prompts, ppo={**STALE})
    for name, run in (("dapo", dapo), ("ppo", ppo)):
        outcomes = run_separate(run, tmp_path / name)
        assert {each.exit_class for each in outcomes} == {"ok"}, outcomes
        longest = values(tmp_path / name, "staleness/longest")
        assert max(longest) <= 2 and len(longest) == run["train"]["steps"]


def test_a_failing_reward_on_a_rollout_rank_ends_the_run_with_its_message(prompts, tmp_path):
    source = tmp_path / "rewards.py"
    source.write_text("def reward(prompts, answers, expected):\n    raise ValueError('no idea')\n")
    options = {**STALE, "rewards": [{"kind": "python", "path": str(source), "function": "reward"}]}
    outcomes = run_separate(spec(prompts, grpo=options), tmp_path / "run")
    assert outcomes[0].exit_class == "user_error" and "no idea" in outcomes[0].reason, outcomes


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"staleness": {"max": 1}}, "need a correction"),
        ({"staleness": {"max": 1, "correction": "decoupled"}}, "never older than the last update"),
        ({"rollout": {"max_new_tokens": 6, "devices": 2}}, "use the devices of the plan"),
        (
            {**STALE, "rollout": {**STALE["rollout"], "top_p": 0.9}},
            "top_p changes the sampler's distribution",
        ),
    ],
)
def test_contradicting_options_are_refused_with_the_reason(prompts, options, field):
    with pytest.raises(UserError, match=field):
        accept(spec(prompts, grpo=options))
    accept(spec(prompts, grpo=STALE))
