"""Two problems of reinforcement learning with exact answers: a walk of five states and a bandit.

The program that trains on them and the page that shows it read the same numbers. Pure functions;
does not sample or train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

TAG = "solved-problems"  # of a run that trains on them
MODULE = "workers.posttraining.solved_problems.main"
STEPS, SECONDS = 600, 50.0

# the walk: states 1 to 5 in a row, an end on each side; the right end has reward 1
STATES = (1, 2, 3, 4, 5)
PATH = (3, 4, 5)  # from the middle to the right end
LAMBDAS = (0.0, 0.5, 0.95, 1.0)
LAMBDA = 0.95  # whose values and advantages are shown
DISCOUNT = 0.9  # of the walk on which PPO learns where to go

# the bandit: five arms, and a penalty for the divergence from a reference
REFERENCE = (0.4, 0.3, 0.15, 0.1, 0.05)
REWARDS = (0.0, 0.2, 0.5, 1.0, 0.8)
BETA = 0.5
ARMS = (1, 2, 3, 4, 5)
KL_ESTIMATORS = ("k1_reward", "k2_loss", "k3_ratio_loss", "k3_loss")
SAMPLED_GRADIENTS = ("reinforce", "baseline", "ppo")
# gradients are estimated for a policy that differs from the sampler's by this factor of the odds
# of the best arm, so that PPO clips
GRADIENTS = ("reinforce", "baseline", "ratio", "ppo")
SHIFT, CLIP = 0.5, 0.2
BEST = 3  # index of the arm with the largest reward
DIVERGENCES = ("k1", "k2", "k3")


def walk_values() -> dict[int, float]:
    """Bellman values of the walk that turns left or right with equal probability: k / 6."""
    return {state: state / (len(STATES) + 1) for state in STATES}


def walk_advantages(lam: float) -> list[float]:
    """Advantages of `PATH` with exact values: each of the steps has the difference 1/6."""
    difference = 1 / (len(STATES) + 1)
    left = range(len(PATH), 0, -1)
    return [difference * sum(lam**power for power in range(steps)) for steps in left]


def best_walk_value() -> float:
    """The value of the middle state for a policy that always turns right."""
    return float(DISCOUNT ** (len(PATH) - 1))


def bandit_optimum() -> list[float]:
    """The policy of the largest mean reward - BETA KL(policy, reference): ref exp(r / BETA)."""
    return _normalized([p * math.exp(r / BETA) for p, r in zip(REFERENCE, REWARDS, strict=True)])


def bandit_fixed_point() -> list[float]:
    """Where k3 in the loss stops: BETA ref / (BETA + mean reward - r).

    Its gradient is that of KL(reference, policy), not of KL(policy, reference).
    """
    low, high = max(REWARDS) - BETA, max(REWARDS)
    for _ in range(200):  # bisection: the sum of probabilities falls with the mean reward
        middle = (low + high) / 2
        total = sum(BETA * p / (BETA + middle - r) for p, r in _arms())
        low, high = (middle, high) if total > 1 else (low, middle)
    return _normalized([BETA * p / (BETA + high - r) for p, r in _arms()])


def objective(policy: Sequence[float]) -> float:
    """Mean reward - BETA KL(policy, reference)."""
    reward = sum(p * r for p, r in zip(policy, REWARDS, strict=True))
    return reward - BETA * divergence(policy)


def divergence(policy: Sequence[float]) -> float:
    """KL(policy, reference)."""
    return sum(p * math.log(p / q) for p, q in zip(policy, REFERENCE, strict=True))


def best_objective(estimator: str) -> float:
    """The objective that gradient steps with an estimator of the penalty reach."""
    return objective(bandit_fixed_point() if estimator == "k3_loss" else bandit_optimum())


def shifted_policy() -> list[float]:
    """The policy whose gradient is estimated."""
    return _normalized(
        [p * math.exp(SHIFT if arm == BEST else 0.0) for arm, p in enumerate(REFERENCE)]
    )


def gradient_moments(estimator: str) -> tuple[float, float]:
    """Mean and standard deviation of one sample's estimate, by the sum over all arms.

    Of the gradient of the mean reward of `shifted_policy` by the logit of the best arm.
    """
    policy = shifted_policy()
    sampler = policy if estimator in ("reinforce", "baseline") else REFERENCE
    mean = sum(p * r for p, r in zip(sampler, REWARDS, strict=True))
    baseline = 0.0 if estimator == "reinforce" else mean
    estimates = []
    for arm, reward in enumerate(REWARDS):
        ratio = policy[arm] / sampler[arm]
        advantage = reward - baseline
        clipped = (ratio > 1 + CLIP and advantage > 0) or (ratio < 1 - CLIP and advantage < 0)
        score = (arm == BEST) - policy[BEST]
        keeps = 0.0 if estimator == "ppo" and clipped else 1.0
        estimates.append(keeps * ratio * advantage * score)
    return _moments(sampler, estimates)


def divergence_moments(estimator: str) -> tuple[float, float]:
    """Mean and standard deviation of k1, k2 or k3 of one sample of the optimum."""
    policy = bandit_optimum()
    ratios = [math.log(p / q) for p, q in zip(policy, REFERENCE, strict=True)]
    terms: Mapping[str, list[float]] = {
        "k1": ratios,
        "k2": [x * x / 2 for x in ratios],
        "k3": [math.exp(-x) - 1 + x for x in ratios],
    }
    return _moments(policy, terms[estimator])


def _arms() -> list[tuple[float, float]]:
    return list(zip(REFERENCE, REWARDS, strict=True))


def _normalized(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [each / total for each in weights]


def _moments(probabilities: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    mean = sum(p * x for p, x in zip(probabilities, values, strict=True))
    square = sum(p * (x - mean) ** 2 for p, x in zip(probabilities, values, strict=True))
    return mean, math.sqrt(square)
