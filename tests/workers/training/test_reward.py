"""Reward models: the optimum of Bradley-Terry, plans, calibration, and Hugging Face's files."""

from __future__ import annotations

import math

import pytest
import torch

from tests.matrix import select
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from tests.workers.training.row_ranks import run_rows
from tests.workers.training.test_preference import DEEP, ONE, ROUTED, STEPS, TWO, spec
from workers.models.convert import main
from workers.models.weights.manifest import step_folder
from workers.models.weights.open import open_weights
from workers.training.objectives import preference_losses as losses
from workers.training.objectives.calibration import BINS, calibration, reliability_sums

PLANS = [
    (TINY, {"tp": 2, "dp": 2, "zero": 2}),
    (DEEP, {"pp": 2, "cp": 2, "schedule": "zbv"}),
    (TINY, {"micro_batch_size": 4}),
    (TINY, {"dp": 4, "zero": 3}),
    (TINY, {"tp": 2, "sequence_parallel": True}),
    (DEEP, {"pp": 2, "tp": 2}),
    (TINY, {"dp": 2, "zero": 0, "micro_batch_size": 2}),
    (ROUTED, {"dp": 2, "ep": 2, "zero": 2}),
]
NAMES = ("loss", "grad_norm", "val_loss", "reward/margin", "reward/accuracy", "val_reward/ece")


def reward(plan, *, model=TINY, margin=True, **more):
    return spec(plan, options={"margin": margin}, objective="reward", model=model, **more)


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    done = {}

    def run(model):
        key = model["name"], model["layers"]
        if key not in done:
            directory = tmp_path_factory.mktemp("alone")
            done[key] = run_rows(pools, reward({}, model=model), directory, ONE)
        return done[key]

    return run


def assert_equal(result, one):
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in NAMES:
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5, abs=1e-6), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4


@pytest.mark.parametrize(("model", "plan"), select(PLANS, 2), ids=str)
def test_equal_to_one_process(model, plan, alone, pools, tmp_path):
    assert_equal(run_rows(pools, reward(plan, model=model), tmp_path, ONE), alone(model))


def test_pairs_that_share_a_row_have_the_losses_of_pairs_in_rows_of_their_own(
    alone, pools, tmp_path
):
    assert_equal(run_rows(pools, reward({}, batch=2), tmp_path, TWO), alone(TINY))


def test_a_reward_is_the_score_of_an_answers_last_token(alone):
    result = alone(TINY)
    folder = result.directory / "checkpoints" / step_folder(STEPS)
    spec_ = open_weights(folder).spec
    assert spec_.scalar_head and final_weights(result, STEPS)["head.weight"].shape == (1, 32)
    values = result.points()[-1]["values"]
    assert values["val_reward/accuracy"] in (0.25, 0.5, 0.75, 1.0)
    pairs = [values.get(f"val_reward/bin_{number}/pairs", 0) for number in range(BINS)]
    assert sum(pairs) == 4


@pytest.mark.parametrize(
    "model",
    [
        {**TINY, "vocab": 300},
        {
            **TINY,
            "norm": "layernorm",
            "position": "learned",
            "bias": "all",
            "gated_mlp": False,
            "activation": "gelu_tanh",
            "kv_heads": 4,
        },
    ],
    ids=["llama", "gpt2"],
)
def test_transformers_reads_it_and_gives_the_same_scores(model, pools, tmp_path):
    from transformers import AutoModelForSequenceClassification

    from workers.models.decoder import Decoder
    from workers.models.weights.reader import fill_model

    run_rows(pools, reward({}, model=model, eval=None), tmp_path / "run", ONE)
    folder = tmp_path / "hf"
    assert main([str(tmp_path / "run" / "checkpoints" / step_folder(STEPS)), str(folder)]) == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    weights = open_weights(folder)
    assert weights.spec.scalar_head
    ours = Decoder(weights.spec).eval()
    fill_model(ours, weights)
    ids = torch.from_numpy(ONE[0].ids[None, :7])
    with torch.no_grad():
        assert float(theirs(ids).logits) == pytest.approx(float(ours(ids)[0, -1]), abs=1e-5)


def test_an_adapter_trains_the_head_and_is_merged_with_it(train, pools, tmp_path):
    train(make_spec(steps=1, checkpoint={"every_steps": 1, "async": False}), tmp_path / "base")
    base = {"path": str(tmp_path / "base" / "checkpoints" / step_folder(1))}
    more = {"init_from": base, "adapter": {"method": "lora", "rank": 4}}
    one = run_rows(pools, reward({}, **more), tmp_path / "one", ONE)
    two = run_rows(pools, reward({"tp": 2, "dp": 2, "zero": 3}, **more), tmp_path / "two", ONE)
    for name in NAMES[:3]:
        assert two.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    folder = tmp_path / "one" / "checkpoints" / step_folder(STEPS)
    merged = open_weights(folder)
    assert merged.spec.scalar_head and merged.read("head.weight").shape == (1, 32)
    assert main([str(folder), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert open_weights(tmp_path / "hf").spec.scalar_head


def test_the_optimum_of_bradley_terry_has_the_rewards_that_made_the_labels():
    """With exact label probabilities, rewards are recovered up to a constant (1e-8)."""
    true = torch.tensor([0.0, 0.2, 0.5, 1.0, 0.8], dtype=torch.float64)
    wins = torch.sigmoid(true[:, None] - true[None, :])
    rewards = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    beta, reference = 0.5, torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64).log()
    policy = reference.clone().requires_grad_()

    def fit(parameters, difference, loss):
        optimizer = torch.optim.LBFGS(
            [parameters],
            lr=1,
            max_iter=300,
            tolerance_grad=1e-13,
            tolerance_change=1e-18,
            line_search_fn="strong_wolfe",
        )

        def closure():
            optimizer.zero_grad()
            total = (wins * loss(difference())).sum() / 20
            total.backward()
            return total

        for _ in range(3):
            optimizer.step(closure)

    fit(rewards, lambda: rewards[:, None] - rewards[None, :], losses.bradley_terry)
    centered = (rewards - rewards.mean()).detach()
    assert (centered - (true - true.mean())).abs().max() <= 1e-8

    def ratio():
        each = policy.log_softmax(0) - reference
        return each[:, None] - each[None, :]

    fit(policy, ratio, lambda d: losses.dpo(d, beta=beta))
    learned = policy.detach().log_softmax(0)
    implied = beta * (learned - reference)
    assert (implied - implied.mean() - (true - true.mean())).abs().max() <= 1e-8
    expected = torch.tensor([0.1784, 0.1996, 0.1819, 0.3296, 0.1105], dtype=torch.float64)
    assert (learned.exp() - expected).abs().max() <= 5e-5


def test_margins_are_subtracted():
    one = losses.bradley_terry(torch.tensor([1.0]), torch.tensor([0.25]))
    assert float(one) == pytest.approx(math.log1p(math.exp(-0.75)), abs=1e-6)


def test_calibration_of_known_confidences():
    difference = torch.tensor([0.1, 0.1, -0.1, 3.0, 3.0, -3.0, 0.0])
    values = calibration([float(each) for each in reliability_sums(difference)])
    low, high = torch.sigmoid(torch.tensor([0.1, 3.0], dtype=torch.float64)).tolist()
    assert values["reward/bin_0/pairs"] == 4 and values["reward/bin_9/pairs"] == 3
    assert values["reward/bin_0/accuracy"] == pytest.approx(2.5 / 4)
    assert values["reward/bin_0/confidence"] == pytest.approx((3 * low + 0.5) / 4)
    error = abs(2.5 - 3 * low - 0.5) + abs(2 - 3 * high)
    assert values["reward/ece"] == pytest.approx(error / 7)
