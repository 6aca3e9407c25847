"""Golden values of policy optimization (computed with TRL and verl), and its exact optima."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.contracts.specs.run import RunSpec
from workers.posttraining.reinforcement.advantages.group_advantages import (
    are_equal,
    group_advantages,
    overlong_penalty,
)
from workers.posttraining.reinforcement.rollouts import Rollout
from workers.posttraining.reinforcement.rows import RolloutRows
from workers.training.objectives import policy_losses as losses

REWARDS, GROUPS = [1, 0, 0, 1, 1, 1, 0, 0.5], [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            "grpo",
            [0.866024, -0.866024, -0.866024, 0.866024, 0.783348, 0.783348, -1.30558, -0.261116],
        ),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, 0.375, 0.375, -0.625, -0.125]),
        ("rloo", [0.666667, -0.666667, -0.666667, 0.666667, 0.5, 0.5, -0.833333, -0.166667]),
        (
            "reinforce_pp",
            [1.054093, -1.054093, -1.054093, 1.054093, 0.790569, 0.790569, -1.317616, -0.263523],
        ),
    ],
)
def test_group_advantages(algorithm, expected):
    computed = group_advantages(REWARDS, GROUPS, algorithm, tokens_N=[2] * 8)
    assert computed.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_group_of_one_and_equal_rewards_teach_nothing():
    for algorithm in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp"):
        assert group_advantages([1.0], [0], algorithm, tokens_N=[3]).tolist() == [0.0]
        equal = group_advantages([1, 1, 1], [0, 0, 0], algorithm, tokens_N=[3, 4, 5])
        assert equal.tolist() == [0.0, 0.0, 0.0]
    assert are_equal([1.0, 1.0]) and not are_equal([1.0, 0.5])


def test_groups_are_identified_by_id_not_by_position():
    order = [4, 0, 5, 1, 6, 2, 7, 3]
    mixed = group_advantages(
        [REWARDS[i] for i in order], [GROUPS[i] for i in order], "grpo", tokens_N=[2] * 8
    )
    sorted_ = group_advantages(REWARDS, GROUPS, "grpo", tokens_N=[2] * 8)
    assert mixed.tolist() == [sorted_[i] for i in order]


def test_overlong_penalty_is_linear_over_the_last_fifth():
    penalties = [overlong_penalty(n, longest=100) for n in (10, 80, 90, 100)]
    assert penalties == [0, 0, -0.5, -1]


def test_clipped_losses():
    log_ratio, advantages = torch.tensor([0.5, -0.5, 0.5, -1.8]), torch.tensor([1.0, 1, -1, -1])
    computed = losses.clipped(log_ratio, advantages, low=0.2, high=0.28)
    assert computed.tolist() == pytest.approx([-1.28, -0.606531, 1.648721, 0.8], abs=1e-5)
    clipped = losses.is_clipped(log_ratio, advantages, low=0.2, high=0.28)
    assert clipped.tolist() == [True, False, False, True]


def test_divergence_estimators():
    logp, reference = torch.tensor([-1.0, -2, -0.5]), torch.tensor([-1.2, -1, -2])
    assert losses.k1(logp, reference).tolist() == pytest.approx([0.2, -1, 1.5], abs=1e-5)
    assert losses.k2(logp, reference).tolist() == pytest.approx([0.02, 0.5, 1.125], abs=1e-5)
    k3 = losses.k3(logp, reference).tolist()
    assert k3 == pytest.approx([0.018731, 0.718282, 0.72313], abs=1e-5)


def test_importance_weights_are_truncated():
    old = torch.tensor([0.0, 3.0], requires_grad=True)
    weights = losses.truncated_weights(old, torch.tensor([0.5, 0.0]))
    assert weights.tolist() == pytest.approx([0.606531, 2.0], abs=1e-5)
    assert not weights.requires_grad


def rollout(tokens: int, value: float) -> Rollout:
    return Rollout(1, 0, 0, [1], [2] * tokens, [0.0] * tokens, 0, advantage=value)


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("dapo", 6.428571), ("grpo", 7.5), ("dr_grpo", 3.75)]
)
def test_aggregation(algorithm, expected):
    """Token losses [1 2 3 4], [10 20], [5]: mean over tokens, over sequences, over the horizon.

    The weights of rows times the losses, divided by the objective's count.
    """
    options = options_of(algorithm=algorithm, group_size=3, prompts_per_step=1)
    rows = RolloutRows(options, 8, 0)
    rows.fill(0, [rollout(n, 1.0) for n in (4, 2, 1)])
    token_losses = [[1, 2, 3, 4], [10, 20], [5]]
    from workers.training.objectives.policy import Policy

    objective = Policy(options)
    total = sum(
        float(np.dot(rows.answer_row(i).weights[rows.span(i)], values))
        for i, values in enumerate(token_losses)
    )
    count = sum(objective.count(rows.answer_row(i)) for i in range(3))
    assert total / count == pytest.approx(expected, abs=1e-5)


def options_of(**options):
    grpo = {"rewards": [{"kind": "exact"}], "rollout": {"max_new_tokens": 4}, **options}
    train = {"objective": "grpo", "steps": 1, "seq_len": 8, "grpo": grpo}
    return RunSpec.from_dict({"kind": "train", "train": train}).train.grpo


# the five-armed bandit: exact expectations instead of samples
REF = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
REWARD = torch.tensor([0, 0.2, 0.5, 1, 0.8], dtype=torch.float64)
BETA = 0.5


def penalized_optimum(estimator: str) -> float:
    """J at the fixed point of policy gradient steps with the estimator, in expectation."""
    logits = REF.log().clone()
    for _ in range(4000):
        logits.requires_grad_()
        logp = logits.log_softmax(0)
        policy, reference = logp.exp().detach(), REF.log()
        reward = REWARD.clone()
        if estimator == "k1_reward":
            reward = reward - BETA * (logp - reference).detach()
        advantage = reward - (policy * reward).sum()
        log_ratio = logp - logp.detach()
        per_action = losses.clipped(log_ratio, advantage, low=0.2, high=0.2)
        per_action = per_action + BETA * losses.penalty(estimator, logp, reference, log_ratio)
        (gradient,) = torch.autograd.grad((policy * per_action).sum(), logits)
        logits = (logits - 0.5 * gradient).detach()
    probabilities = logits.softmax(0)
    divergence = (probabilities * (probabilities / REF).log()).sum()
    return float((probabilities * REWARD).sum() - BETA * divergence)


@pytest.mark.parametrize(
    ("estimator", "optimum"),
    [
        ("k1_reward", 0.403650),
        ("k2_loss", 0.403650),
        ("k3_ratio_loss", 0.403650),
        ("k3_loss", 0.384197),
    ],
)
def test_the_bandit_reaches_the_exact_optimum(estimator, optimum):
    assert penalized_optimum(estimator) == pytest.approx(optimum, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1_loss", "k3_reward"])
def test_estimators_that_collapse_are_refused_with_the_reason(estimator):
    with pytest.raises(ValueError, match="policy collapses"):
        options_of(kl={"coef": 0.1, "estimator": estimator})
