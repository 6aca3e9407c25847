"""Runs of PPO: policy and value model are equal under every plan, and resumed exactly."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from tests.matrix import select
from tests.workers.posttraining.policy_ranks import run_policy, run_training, scores_of
from tests.workers.posttraining.test_policy_runs import TINY, WIDE, prompts, restored
from tests.workers.training.conftest import final_weights, relative
from workers.contracts.specs.run import RunSpec
from workers.models.weights.open import open_weights
from workers.runtime.exit_codes import UserError
from workers.training.setup.spec_loading import accept

__all__ = ["prompts"]
pytestmark = pytest.mark.ranks
STEPS = 4


def spec(prompts, plan=None, *, ppo=None, **train):
    options = {
        "rewards": [{"kind": "regex", "pattern": "[0-9a-z]"}, {"kind": "exact", "weight": 0.5}],
        "rollout": {"max_new_tokens": 6},
        "minibatches": 2,
        "epochs": 2,
        **(ppo or {}),
    }
    return {
        "kind": "train",
        "model": TINY,
        "plan": {"global_batch_size": 4, "micro_batch_size": 2, **(plan or {})},
        "data": {"path": str(prompts), "format": "prompt_completion"},
        "train": {
            "objective": "ppo",
            "steps": STEPS,
            "seq_len": 16,
            "seed": 3,
            "optimizer": {"name": "sgd", "lr": 0.2},
            "clip_norm": 1.0,
            "checkpoint": {"every_steps": STEPS, "async": False},
            "ppo": options,
            **train,
        },
    }


PLANS = [
    {"micro_batch_size": 4},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "precision": "fp32"},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "tp": 2, "zero": 2, "micro_batch_size": 1},
    {"pp": 2, "schedule": "1f1b"},
    {"dp": 2, "pp": 2, "zero": 2, "schedule": "gpipe", "micro_batch_size": 1},
    {"recompute": "auto"},
    {"offload": "optimizer"},
    {"dp": 2, "zero": 3, "offload": "all", "recompute": "auto"},
    {"dp": 2, "zero": 2, "offload": "nvme"},
]
COMPARED = ("loss", "kl", "entropy", "clip_fraction", "grad_norm", "value_loss", "value/grad_norm")
COMPARED = (*COMPARED, "value/error", "value/clip_fraction", "value/explained_variance")


@pytest.fixture(scope="module")
def alone(pools, prompts, tmp_path_factory):
    """The run in one process."""
    result = run_policy(pools, spec(prompts), tmp_path_factory.mktemp("alone"))
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    return result


@pytest.mark.parametrize("plan", select(PLANS, (0, 1, 3, 4, 7, 11, 12)))
def test_updates_are_the_same_under_every_plan(pools, alone, prompts, tmp_path, plan):
    """From the same stored rollouts: generation itself may differ in the last bit."""
    shutil.copytree(alone.directory / "checkpoints/rollouts", tmp_path / "checkpoints/rollouts")
    other = run_policy(pools, spec(prompts, plan), tmp_path)
    assert {each["class"] for each in other.outcomes} == {"ok"}, other.outcomes
    for name in COMPARED:
        assert other.values(name) == pytest.approx(alone.values(name), rel=1e-5, abs=1e-6), name
    expected = final_weights(alone, STEPS)
    for name, weight in final_weights(other, STEPS).items():
        assert relative(weight, expected[name]) <= 1e-5, name


@pytest.mark.parametrize("plan", select([{"dp": 2, "zero": 3}, {"pp": 2}, {"tp": 2}, {"cp": 2}], 2))
def test_values_and_advantages_are_the_same_under_every_plan(pools, alone, prompts, tmp_path, plan):
    """Computed by each plan from its own answers, which fp32 samples alike."""
    result = run_policy(pools, spec(prompts, plan), tmp_path)
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    path = "checkpoints/rollouts/iteration-00000000.jsonl"
    ours, theirs = (
        [json.loads(line) for line in (each.directory / path).read_text().splitlines()[1:]]
        for each in (alone, result)
    )
    assert [each["token_ids"] for each in ours] == [each["token_ids"] for each in theirs]
    for name in ("values", "returns", "advantages", "old_logprobs", "reference_logprobs"):
        for mine, other in zip(ours, theirs, strict=True):
            assert other[name] == pytest.approx(mine[name], rel=1e-5, abs=2e-6), name


def test_a_resumed_run_continues_policy_and_value_model(pools, prompts, tmp_path):
    """In the middle of an iteration, with the optimizers' state."""
    checkpoint = {"every_steps": 1, "async": False, "keep": 2}
    options = {"optimizer": {"name": "adamw", "lr": 0.01}, "checkpoint": checkpoint}
    ppo = {"value": {"lr": 0.02}}
    one = run_policy(pools, spec(prompts, ppo=ppo, steps=8, **options), tmp_path / "whole")
    directory = tmp_path / "resumed"
    run_policy(pools, spec(prompts, ppo=ppo, steps=6, **options), directory)
    second = run_policy(pools, spec(prompts, ppo=ppo, steps=8, **options), directory)
    assert [each["step"] for each in restored(second)] == [7]
    for name in ("loss", "value_loss", "value/grad_norm", "kl", "reward/mean"):
        ours = {p["step"]: p["values"].get(name) for p in one.points()}
        theirs = {p["step"]: p["values"].get(name) for p in second.points()}
        assert (theirs[7], theirs[8]) == (ours[7], ours[8]), name


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3}, {"pp": 2, "schedule": "1f1b"}])
def test_a_run_resumed_on_two_ranks_has_the_same_value_model(pools, prompts, tmp_path, plan):
    options = {"optimizer": {"name": "adamw", "lr": 0.01}}
    options["checkpoint"] = {"every_steps": 1, "async": False, "keep": 2}
    one = run_policy(pools, spec(prompts, steps=4, **options), tmp_path / "whole")
    directory = tmp_path / "resumed"
    run_policy(pools, spec(prompts, steps=2, **options), directory)
    second = run_policy(pools, spec(prompts, plan, steps=4, **options), directory)
    assert {each["class"] for each in second.outcomes} == {"ok"}, second.outcomes
    for name in ("loss", "value_loss", "value/grad_norm"):
        assert second.values(name)[2:] == pytest.approx(one.values(name)[2:], rel=1e-5, abs=1e-6), (
            name
        )


@pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
def test_adapters_of_policy_and_value_model_are_trained(pools, prompts, tmp_path, method):
    def wide(*args, **options):
        return {**spec(prompts, *args, **options), "model": WIDE}

    base = run_policy(pools, wide(steps=1), tmp_path / "base")
    folder = base.directory / "checkpoints/step-00000001"
    made = {"init_from": {"path": str(folder)}, "adapter": {"method": method, "rank": 4}}
    made["checkpoint"] = {"every_steps": 1, "async": False, "keep": 2}
    one = run_policy(pools, wide(**made), tmp_path / "one")
    assert one.outcomes[0]["class"] == "ok", one.outcomes
    assert one.values("kl")[0] == pytest.approx(0, abs=1e-9)
    assert all(norm > 0 for norm in one.values("value/grad_norm"))
    shutil.copytree(one.directory / "checkpoints/rollouts", tmp_path / "two/checkpoints/rollouts")
    two = run_policy(pools, wide({"dp": 2, "zero": 2}, **made), tmp_path / "two")
    assert {each["class"] for each in two.outcomes} == {"ok"}, two.outcomes
    for name in COMPARED:
        assert two.values(name) == pytest.approx(one.values(name), rel=1e-5, abs=1e-6), name
    # the adapter's checkpoint holds the value model's adapter and head
    shutil.rmtree(tmp_path / "two/checkpoints/step-00000004")
    again = run_policy(pools, wide(**made), tmp_path / "two")
    assert again.values("value_loss")[-1] == pytest.approx(one.values("value_loss")[3])


@pytest.fixture(scope="module")
def reward_model(pools, tmp_path_factory):
    """A checkpoint of objective reward with the policy's shape."""
    folder = tmp_path_factory.mktemp("reward")
    pairs = folder / "pairs.jsonl"
    lines = [
        {"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "x" * (n % 3 + 1)}
        for n in range(8)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {
        "kind": "train",
        "model": TINY,
        "plan": {"global_batch_size": 4, "micro_batch_size": 4},
        "data": {"path": str(pairs), "format": "preference"},
        "train": {
            "objective": "reward",
            "steps": 2,
            "seq_len": 32,
            "checkpoint": {"every_steps": 2, "async": False},
        },
    }
    run_training(made, folder / "run")
    return folder / "run/checkpoints/step-00000002"


def test_the_value_model_starts_from_a_reward_model(pools, prompts, reward_model, tmp_path):
    weights = {"path": str(reward_model)}
    ppo = {"rewards": None, "reward_model": weights, "value": {"init_from": weights}}
    made = spec(prompts, ppo=ppo)
    result = run_policy(pools, made, tmp_path)
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    [loaded] = [e["data"] for e in result.events() if e["type"] == "value_weights_loaded"]
    assert loaded["head"] == "loaded" and loaded["path"] == weights["path"]
    assert all(math.isfinite(x) for x in result.values("reward/reward_model"))
    # the first values are the reward model's own scores of prompt and answer before each token
    line = (tmp_path / "checkpoints/rollouts/iteration-00000000.jsonl").read_text().splitlines()[1]
    rollout = json.loads(line)
    prompt, answer = rollout["prompt_ids"], rollout["token_ids"]
    scored = scores_of(open_weights(reward_model), [*prompt, *answer])
    first = len(prompt) - 1
    assert rollout["values"] == pytest.approx(scored[first : first + len(answer)], abs=1e-5)
    assert rollout["reward"] == pytest.approx(scored[-1], abs=1e-5)


def test_a_value_model_of_another_vocabulary_is_refused(pools, prompts, reward_model, tmp_path):
    made = spec(prompts, ppo={"value": {"init_from": {"path": str(reward_model)}}})
    made["model"] = {**TINY, "vocab": 300}
    [outcome] = run_policy(pools, made, tmp_path).outcomes
    assert outcome["class"] == "user_error"
    assert "train.ppo.value.init_from" in outcome["reason"] and "vocab 256" in outcome["reason"]


def test_a_checkpoint_without_value_model_is_refused(pools, prompts, tmp_path):
    grpo = {"rewards": [{"kind": "exact"}], "rollout": {"max_new_tokens": 6}}
    grpo |= {"group_size": 2, "prompts_per_step": 2}
    made = spec(prompts, steps=1)
    other = json.loads(json.dumps(made))
    del other["train"]["ppo"]
    other["train"] |= {
        "objective": "grpo",
        "grpo": {**grpo, "group_size": 2, "prompts_per_step": 2},
    }
    assert run_policy(pools, other, tmp_path).outcomes[0]["class"] == "ok"
    [outcome] = run_policy(pools, spec(prompts, steps=2), tmp_path).outcomes
    assert outcome["class"] == "user_error" and "has no value model" in outcome["reason"]


def test_an_iteration_has_the_prompts_that_fill_the_batches(prompts):
    made = spec(prompts)
    assert RunSpec.from_dict(made).train.ppo.prompts_per_step == 8
    made["train"]["ppo"]["group_size"] = 4
    assert accept(made).train.ppo.prompts_per_step == 2


def test_pipedream_is_refused(prompts):
    with pytest.raises(UserError, match=r"plan\.schedule: pipedream updates between micro-batches"):
        accept(spec(prompts, {"pp": 2, "schedule": "pipedream"}))


@pytest.mark.parametrize(
    ("ppo", "message"),
    [
        ({"kl": {"coef": 0, "target": 0.1}}, "kl.target has no effect"),
        ({"kl": {"estimator": "k1_loss"}}, "the policy collapses"),
        (
            {"rewards": None, "reward_model": {"package": "x"}},
            "neither a folder of weights nor a serve run",
        ),
        ({"rewards": None}, "ppo.rewards"),
        ({"gae": {"lam": 1.5}}, "less than or equal to 1"),
        ({"group_size": 3, "prompts_per_step": 3}, "9 answers do not divide into 2 minibatches"),
    ],
)
def test_contradictions_are_refused(prompts, ppo, message):
    with pytest.raises(ValueError, match=message):
        RunSpec.from_dict(spec(prompts, ppo=ppo))
