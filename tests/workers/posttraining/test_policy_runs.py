"""Runs of policy optimization: equal under every plan, resumed without losing a rollout."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from tests.matrix import select
from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.training.conftest import final_weights, relative
from workers.posttraining.reinforcement.rollouts import Rollout, RolloutFiles
from workers.runtime.exit_codes import UserError

pytestmark = pytest.mark.ranks

TINY = {
    "name": "tiny",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 256,
    "max_seq_len": 32,
}
STEPS = 4


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def spec(prompts, plan=None, *, grpo=None, **train):
    options = {
        "group_size": 4,
        "prompts_per_step": 2,
        # random answers of bytes: some have a character below a space
        "rewards": [{"kind": "regex", "pattern": "[0-9a-z]"}, {"kind": "exact", "weight": 0.5}],
        "rollout": {"max_new_tokens": 6},
        **(grpo or {}),
    }
    rows = options["group_size"] * options["prompts_per_step"] // options.get("minibatches", 1)
    return {
        "kind": "train",
        "model": TINY,
        "plan": {"global_batch_size": rows, "micro_batch_size": 2, **(plan or {})},
        "data": {"path": str(prompts), "format": "prompt_completion"},
        "train": {
            "objective": "grpo",
            "steps": STEPS,
            "seq_len": 16,
            "seed": 3,
            "optimizer": {"name": "sgd", "lr": 0.5},
            "checkpoint": {"every_steps": STEPS, "async": False},
            "grpo": options,
            **train,
        },
    }


def restored(result):
    return [each["data"] for each in result.events() if each["type"] == "rollouts_restored"]


FULL = {"kl": {"coef": 0.1, "estimator": "k3_ratio_loss"}, "minibatches": 2, "epochs": 2}
PLANS = [
    ("grpo", {"micro_batch_size": 4}),
    ("dr_grpo", {"dp": 2, "zero": 1}),
    ("dapo", {"dp": 2, "zero": 3}),
    ("rloo", {"tp": 2}),
    ("reinforce_pp", {"cp": 2}),
    ("grpo", {"dp": 2, "tp": 2, "zero": 2, "micro_batch_size": 1}),
    ("grpo", {"pp": 2, "schedule": "1f1b"}),
    ("rloo", {"dp": 2, "pp": 2, "zero": 1, "schedule": "gpipe", "micro_batch_size": 1}),
]


@pytest.fixture(scope="module")
def alone(pools, prompts, tmp_path_factory):
    """`alone(algorithm)`: the run in one process, trained once."""
    done = {}

    def run(algorithm):
        if algorithm not in done:
            directory = tmp_path_factory.mktemp("alone")
            made = spec(prompts, grpo={"algorithm": algorithm, **FULL})
            done[algorithm] = run_policy(pools, made, directory)
            assert done[algorithm].outcomes[0]["class"] == "ok", done[algorithm].outcomes
        return done[algorithm]

    return run


@pytest.mark.parametrize(("algorithm", "plan"), select(PLANS, (0, 1, 2, 3, 6)))
def test_updates_are_the_same_under_every_plan(pools, alone, prompts, tmp_path, algorithm, plan):
    """From the same stored rollouts: generation itself may differ in the last bit."""
    one = alone(algorithm)
    shutil.copytree(one.directory / "checkpoints" / "rollouts", tmp_path / "checkpoints/rollouts")
    made = spec(prompts, plan, grpo={"algorithm": algorithm, **FULL})
    other = run_policy(pools, made, tmp_path)
    assert {each["class"] for each in other.outcomes} == {"ok"}, other.outcomes
    assert [each["step"] for each in restored(other)] == [1]
    for name in ("loss", "kl", "entropy", "clip_fraction", "grad_norm"):
        ours, theirs = one.values(name), other.values(name)
        assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-6), name
    expected = final_weights(one, STEPS)
    for name, weight in final_weights(other, STEPS).items():
        assert relative(weight, expected[name]) <= 1e-5, name


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ({"dp": 2, "zero": 3}, {}),
        # both ends of the pipeline hold the embedding
        ({"pp": 2, "schedule": "interleaved_1f1b"}, {"layers": 4, "tie_embeddings": True}),
    ],
)
def test_sampler_and_trainer_agree_on_every_token(pools, prompts, tmp_path, plan, model):
    """Also at a temperature, over updates that change the weights, and under sharding."""
    options = {"rollout": {"max_new_tokens": 6, "temperature": 0.7}, **FULL, "epochs": 1}
    made = spec(prompts, plan, grpo=options, steps=6)
    made["model"] = {**TINY, **model}
    result = run_policy(pools, made, tmp_path)
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    lines = (tmp_path / "checkpoints/rollouts/iteration-00000002.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines[1:]]
    assert {each["weight_version"] for each in rollouts} == {4}
    for each in rollouts:
        assert each["logprobs"] == pytest.approx(each["old_logprobs"], abs=1e-5)
    assert max(result.values("mismatch/kl")) < 1e-9


def test_a_resumed_run_learns_from_the_stored_rollouts(pools, prompts, tmp_path):
    """Killed in the middle of an iteration: the curve continues, and no rollout comes twice."""
    checkpoint = {"every_steps": 1, "async": False, "keep": 2}
    whole = spec(prompts, grpo=FULL, steps=8, checkpoint=checkpoint)
    one = run_policy(pools, whole, tmp_path / "whole")
    # two iterations of four updates; the first attempt leaves after the sixth
    directory = tmp_path / "resumed"
    run_policy(pools, spec(prompts, grpo=FULL, steps=6, checkpoint=checkpoint), directory)
    second = run_policy(pools, whole, directory)
    assert [(each["step"], each["iteration"]) for each in restored(second)] == [(7, 1)]
    for name in ("loss", "kl", "entropy", "reward/mean"):
        ours = {p["step"]: p["values"].get(name) for p in one.points()}
        theirs = {p["step"]: p["values"].get(name) for p in second.points()}
        assert (theirs[7], theirs[8]) == (ours[7], ours[8]), name
    log = [
        json.loads(line)
        for line in (directory / "rank-0" / "rollouts.jsonl").read_text().splitlines()
    ]
    seen = [(each["step"], each["prompt_id"], each["sample"]) for each in log]
    assert len(seen) == len(set(seen)) == 16
    assert "old_logprobs" not in log[0] and log[0]["text"] is not None


def test_a_run_resumed_between_iterations_goes_on_with_the_next_prompts(pools, prompts, tmp_path):
    checkpoint = {"every_steps": 1, "async": False}
    whole = spec(prompts, steps=4, checkpoint=checkpoint)
    one = run_policy(pools, whole, tmp_path / "whole")
    directory = tmp_path / "resumed"
    run_policy(pools, spec(prompts, steps=2, checkpoint=checkpoint), directory)
    second = run_policy(pools, whole, directory)
    assert second.values("loss") == one.values("loss")
    assert second.values("reward/mean") == one.values("reward/mean")
    shown = [each["data"] for each in second.events() if each["type"] == "rollouts_sampled"]
    assert [each["step"] for each in shown] == [1, 2, 3, 4]
    assert all(len(each["groups"]) == 2 for each in shown)
    answers = shown[0]["groups"][0]["answers"]
    assert len(answers) == 4 and {"text", "reward", "advantage"} <= set(answers[0])


def test_a_fork_samples_on_and_other_options_use_no_stored_rollouts(pools, prompts, tmp_path):
    checkpoint = {"every_steps": 1, "async": False}
    one = run_policy(pools, spec(prompts, steps=4, checkpoint=checkpoint), tmp_path / "one")
    # a fork has the checkpoint alone
    folder = tmp_path / "fork" / "checkpoints" / "step-00000002"
    shutil.copytree(one.directory / "checkpoints" / folder.name, folder)
    fork = run_policy(pools, spec(prompts, steps=4, checkpoint=checkpoint), tmp_path / "fork")
    missing = [each["data"] for each in fork.events() if each["type"] == "rollouts_missing"]
    assert missing == [{"iteration": 2, "position": 4}]
    assert fork.values("loss") == one.values("loss")[2:]
    # the same folder with other rewards: its iterations are not those of this run
    changed = spec(prompts, steps=1, grpo={"rewards": [{"kind": "regex", "pattern": "."}]})
    stored = tmp_path / "changed" / "checkpoints" / "rollouts"
    shutil.copytree(one.directory / "checkpoints" / "rollouts", stored)
    other = run_policy(pools, changed, tmp_path / "changed")
    assert restored(other) == [] and other.values("reward/mean")[0] > 0.5
    # iterations of the discarded continuation are gone
    assert [path.name for path in stored.iterdir()] == ["iteration-00000000.jsonl"]


def test_rollouts_are_stored_whatever_their_text(tmp_path):
    odd = "a\u2028b\x85c\ud800"
    rollout = Rollout(1, 0, 0, [1], [2], [-0.5], 0, prompt=odd, text=odd, expected=odd)
    files = RolloutFiles(tmp_path / "rollouts", digest="d")
    files.write(0, [rollout, rollout], {"next_position": 1})
    stored = files.read(0)
    assert stored is not None and stored[0] == [rollout, rollout]
    assert RolloutFiles(tmp_path / "rollouts", digest="other").read(0) is None
    path = tmp_path / "rollouts" / "iteration-00000000.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match="is damaged"):
        files.read(0)


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 2}, {"pp": 2, "schedule": "1f1b"}])
def test_an_adapter_is_trained_and_its_reference_is_the_model_without_it(
    pools, prompts, tmp_path, plan
):
    """The sampler computes with merged weights: it agrees with the trainer."""
    base = run_policy(pools, spec(prompts, steps=1), tmp_path / "base")
    options = {"kl": {"coef": 0.1}, "minibatches": 2}
    made = spec(
        prompts,
        plan,
        grpo=options,
        steps=4,
        init_from={"path": str(base.directory / "checkpoints" / "step-00000001")},
        adapter={"method": "lora", "rank": 4},
    )
    result = run_policy(pools, made, tmp_path / "adapter")
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert result.values("kl")[0] == pytest.approx(0, abs=1e-9)
    assert result.values("kl")[-1] > 1e-6
    assert max(result.values("mismatch/kl")) < 1e-9


# widths that blocks of 64 divide
WIDE = {**TINY, "hidden": 64, "heads": 4, "ffn": 64}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("method", ["dora", "qlora"])
def test_merged_and_dequantized_weights_are_sampled_from(pools, prompts, tmp_path, method, zero):
    """The sampler's log-probabilities are the trainer's after updates, on one rank and on two."""
    base = run_policy(pools, {**spec(prompts, steps=1), "model": WIDE}, tmp_path / "base")
    results = []
    for number, plan in enumerate(({}, {"dp": 2, "zero": zero})):
        made = spec(
            prompts,
            plan,
            grpo={"kl": {"coef": 0.1}, "minibatches": 2},
            steps=4,
            init_from={"path": str(base.directory / "checkpoints" / "step-00000001")},
            adapter={"method": method, "rank": 4},
        )
        result = run_policy(pools, {**made, "model": WIDE}, tmp_path / str(number))
        assert result.outcomes[0]["class"] == "ok", result.outcomes
        assert result.values("kl")[0] == pytest.approx(0, abs=1e-9)
        assert result.values("kl")[-1] > 1e-8
        assert max(result.values("mismatch/kl")) < 1e-9
        results.append(result)
    one, two = results
    assert two.values("loss") == pytest.approx(one.values("loss"), rel=1e-5, abs=1e-7)
    assert two.values("grad_norm") == pytest.approx(one.values("grad_norm"), rel=1e-5)


def test_k1_reward_and_an_adaptive_coefficient(pools, prompts, tmp_path):
    options = {"kl": {"coef": 0.2, "estimator": "k1_reward", "target": 1e-4}}
    result = run_policy(pools, spec(prompts, grpo=options), tmp_path)
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    coefficients = result.values("kl_coef")
    assert coefficients[0] == 0.2 and all(math.isfinite(each) for each in coefficients)
    assert len(set(coefficients)) > 1
