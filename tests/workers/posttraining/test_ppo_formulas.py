"""Golden values of PPO (computed with TRL and verl), and the exact solution of a walk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.contracts.specs.finetuning.reinforcement import PpoBody
from workers.posttraining.reinforcement.advantages.assign import assign_by_token
from workers.posttraining.reinforcement.advantages.gae import (
    explained_variance,
    gae,
    padded,
    whiten,
)
from workers.posttraining.reinforcement.advantages.group_advantages import adapted_coefficient
from workers.posttraining.reinforcement.rollouts import Rollout
from workers.training.objectives import policy_losses as losses

REWARDS = np.array([[0, 0, 1, 0], [-0.1, 0.5, 0, 0]])
VALUES = np.array([[0.1, 0.2, 0.3, 0.9], [0.4, -0.2, 0.7, 0.7]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=bool)


def test_advantages_of_tokens():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95)
    expected = [0.82675, 0.765, 0.7, -0.035, 0.7]
    assert advantages[MASK].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[MASK].tolist() == pytest.approx([0.92675, 0.965, 1.0, 0.365, 0.5], abs=1e-9)
    whitened = whiten(advantages, MASK)
    golden = [0.664821, 0.490425, 0.306851, -1.768949, 0.306851]
    assert whitened[MASK].tolist() == pytest.approx(golden, abs=1e-6)
    assert not whitened[~MASK].any() and not advantages[~MASK].any()


def test_a_masked_token_passes_on_what_follows_it():
    """As for the tokens of a tool between two turns of an answer."""
    mask = np.array([[True, False, True]])
    rewards, values = np.array([[0.0, 0.0, 1.0]]), np.array([[0.1, 0.9, 0.3]])
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    # 0.3 - 0.1 + 0.95 x 0.7
    assert advantages.tolist() == pytest.approx(np.array([[0.865, 0.0, 0.7]]))


def test_the_walk_of_five_states_is_solved_exactly():
    """V = k / 6: from states 3, 4, 5 to the end with reward 1."""
    rewards, values = np.array([[0.0, 0.0, 1.0]]), np.array([[3 / 6, 4 / 6, 5 / 6]])
    advantages, _ = gae(rewards, values, np.ones((1, 3), dtype=bool), gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.475417, 0.325, 0.166667], abs=1e-6)


def test_values_learned_from_walks_are_those_of_bellman():
    """TD(lambda) returns of GAE, averaged over walks, lead to V = k / 6."""
    generator = np.random.default_rng(0)
    values = np.full(7, 0.5)
    values[[0, 6]] = 0.0
    for sweep in range(60):
        rewards, states = [], []
        for _ in range(200):
            state, path = 3, []
            while 0 < state < 6:
                path.append(state)
                state += int(generator.choice((-1, 1)))
            states.append(path)
            rewards.append([0.0] * (len(path) - 1) + [float(state == 6)])
        rewards_NT, mask = padded(rewards)
        values_NT, _ = padded([[values[state] for state in path] for path in states])
        _, returns = gae(rewards_NT, values_NT, mask, gamma=1.0, lam=0.95)
        seen = np.concatenate([np.array(path) for path in states])
        for state in range(1, 6):
            mean = returns[mask][seen == state].mean()
            values[state] += (mean - values[state]) * 4 / (sweep + 4)
    assert values[1:6].tolist() == pytest.approx([k / 6 for k in range(1, 6)], abs=0.02)


def test_clipped_value_losses():
    values, old = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 0.5])
    returns = torch.tensor([0.0, 2.0, 0.5])
    out, clipped = losses.clipped_value(values, old, returns, clip=0.2)
    # max(1, 0.49) / 2, max(1, 1.69) / 2, max(0.25, 0.04) / 2
    assert out.tolist() == pytest.approx([0.5, 0.845, 0.125], abs=1e-6)
    assert clipped.tolist() == [False, True, False]
    out, clipped = losses.clipped_value(values, old, returns, clip=None)
    assert out.tolist() == pytest.approx([0.5, 0.5, 0.125]) and not clipped.any()


def test_the_coefficient_adapts_by_the_clipped_relative_error():
    assert adapted_coefficient(0.2, 6.6, 6.0, answers=100) == pytest.approx(0.2 * 1.001)
    assert adapted_coefficient(0.2, 60.0, 6.0, answers=100) == pytest.approx(0.2 * 1.002)
    assert adapted_coefficient(0.2, -60.0, 6.0, answers=100) == pytest.approx(0.2 * 0.998)
    assert adapted_coefficient(0.2, 6.0, 6.0, answers=100) == 0.2


def rollout(**fields):
    tokens = len(fields["values"])
    return Rollout(1, 0, 0, [1], [2] * tokens, [-1.0] * tokens, 0, **fields)


def test_rewards_belong_to_the_last_token_and_the_divergence_to_each():
    options = PpoBody.from_dict({"rewards": [{"kind": "exact"}]})
    first = rollout(values=[0.1, 0.2, 0.3], reward=1.0, reference_logprobs=[-1.0] * 3)
    second = rollout(values=[0.4, -0.2], reward=0.5, reference_logprobs=[-3.0, -1.0])
    failed = rollout(values=[9.0], failure="judge: is down")
    # 0.05 times the log-ratio of 2 is the reward of -0.1 of the golden values
    assign_by_token([first, failed, second], options, kl_coef=0.05)
    assert first.advantages == pytest.approx([0.664821, 0.490425, 0.306851], abs=1e-6)
    assert second.advantages == pytest.approx([-1.768949, 0.306851], abs=1e-6)
    assert second.returns == pytest.approx([0.365, 0.5])
    assert failed.advantages is None and failed.advantage == 0.0


def test_explained_variance():
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.ones(3), returns) == 0.0
    assert explained_variance(returns, np.ones(3)) == 0.0
