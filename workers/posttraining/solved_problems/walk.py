"""The walk of five states: values by generalized advantage estimation, and a policy by PPO.

Learns with the functions that train language models; exact answers are in the contracts' catalog.
Shapes: N walks, T steps of the longest one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.contracts.catalog import solved_problems as problems
from workers.posttraining.reinforcement.advantages.gae import Floats, gae, whiten
from workers.training.objectives import policy_losses as losses

_STATES = len(problems.STATES)
_LONGEST = 400  # steps; a walk of equal chances is that long once in 10^24 walks
_WALKS, _POLICY_WALKS = 2048, 256
_EPOCHS = 2
_RATE, _VALUE_RATE = 0.5, 0.2


class Walks:
    """Walks from the middle: the state before each step, whether it turned right, and rewards."""

    def __init__(self, right: Floats, count: int, generator: np.random.Generator) -> None:
        """`right` holds the probability of a right turn in each state."""
        at = np.full(count, problems.PATH[0])
        states, turns, rewards = [], [], []
        for _ in range(_LONGEST):
            inside = (at > 0) & (at <= _STATES)
            if not inside.any():
                break
            state = np.clip(at, 1, _STATES) - 1
            turn = generator.random(count) < right[state]
            states.append(np.where(inside, state, -1))
            turns.append(turn)
            at = np.where(inside, at + np.where(turn, 1, -1), at)
            rewards.append((inside & (at > _STATES)).astype(np.float64))
        self.states_NT = np.stack(states, axis=1)
        self.turns_NT = np.stack(turns, axis=1)
        self.rewards_NT = np.stack(rewards, axis=1)
        self.mask_NT: NDArray[np.bool_] = self.states_NT >= 0

    def advantages(self, values: Floats, *, gamma: float, lam: float) -> tuple[Floats, Floats]:
        """Advantages and returns by the values of the states."""
        return gae(self.rewards_NT, values[self.states_NT], self.mask_NT, gamma=gamma, lam=lam)

    def of_steps(self, numbers_NT: NDArray[np.generic]) -> Tensor:
        """The numbers of all steps of all walks, in one row."""
        return torch.from_numpy(np.ascontiguousarray(numbers_NT[self.mask_NT]))


class Evaluation:
    """Values of the walk of equal chances, learned from returns by GAE with one lambda."""

    def __init__(self, lam: float) -> None:
        self.lam = lam
        self.values = torch.full((_STATES,), 0.5, dtype=torch.float64, requires_grad=True)

    def learn(self, walks: Walks, *, rate: float) -> None:
        """One step of the value loss; each state counts alike."""
        _, returns = walks.advantages(self.values.detach().numpy(), gamma=1.0, lam=self.lam)
        _descend_values(self.values, walks, returns, rate=rate)

    def error(self) -> float:
        """Root mean square of the difference from Bellman's values."""
        exact = np.array(list(problems.walk_values().values()))
        return float(np.sqrt(np.mean((self.values.detach().numpy() - exact) ** 2)))

    def path_advantages(self) -> list[float]:
        """Advantages of the walk from the middle straight to the right end."""
        values = self.values.detach().numpy()[None, problems.PATH[0] - 1 :]
        rewards = np.zeros_like(values)
        rewards[0, -1] = 1.0
        mask = np.ones_like(values, dtype=bool)
        advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=self.lam)
        return [float(each) for each in advantages[0]]


class Turning:
    """A policy that learns by PPO where to turn, and the values of its states."""

    def __init__(self) -> None:
        self.logits = torch.zeros(_STATES, 2, dtype=torch.float64, requires_grad=True)
        self.values = torch.full((_STATES,), 0.5, dtype=torch.float64, requires_grad=True)

    def right(self) -> Floats:
        """The probability of a right turn in each state."""
        out: Floats = self.logits.detach().softmax(dim=1)[:, 1].numpy()
        return out

    def learn(self, generator: np.random.Generator) -> None:
        """One iteration: walks by the policy, GAE, clipped updates of policy and values."""
        walks = Walks(self.right(), _POLICY_WALKS, generator)
        values = self.values.detach().numpy()
        gamma, lam = problems.DISCOUNT, problems.LAMBDA
        advantages, returns = walks.advantages(values, gamma=gamma, lam=lam)
        whitened = walks.of_steps(whiten(advantages, walks.mask_NT))
        states = walks.of_steps(walks.states_NT)
        turns = walks.of_steps(walks.turns_NT.astype(np.int64))
        old = self.logits.detach().log_softmax(dim=1)[states, turns]
        for _ in range(_EPOCHS):
            logp = self.logits.log_softmax(dim=1)[states, turns]
            clip = problems.CLIP
            loss = losses.clipped(logp - old, whitened, low=clip, high=clip).mean()
            (gradient,) = torch.autograd.grad(loss, self.logits)
            with torch.no_grad():
                self.logits -= _RATE * gradient
        _descend_values(self.values, walks, returns, rate=_VALUE_RATE)

    def bellman(self) -> Floats:
        """The exact values of the current policy: (1 - gamma P) V = r."""
        right = self.right()
        moves = np.diag(right[:-1], 1) + np.diag(1 - right[1:], -1)
        rewards = np.zeros(_STATES)
        rewards[-1] = right[-1]
        solved = np.linalg.solve(np.eye(_STATES) - problems.DISCOUNT * moves, rewards)
        return solved.astype(np.float64)


class WalkProblem:
    """Values by each lambda, and the policy."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        self.evaluations = {lam: Evaluation(lam) for lam in problems.LAMBDAS}
        self.turning = Turning()

    def step(self, number: int) -> dict[str, float]:
        """Learn once; the metrics of the step."""
        walks = Walks(np.full(_STATES, 0.5), _WALKS, self.generator)
        for each in self.evaluations.values():
            # the steps' sum grows without bound and that of their squares does not: noise averages
            each.learn(walks, rate=30 / (number + 120))
        self.turning.learn(self.generator)
        shown = self.evaluations[problems.LAMBDA]
        middle = problems.PATH[0] - 1
        path = zip(problems.PATH, shown.path_advantages(), strict=True)
        return {
            **{
                f"walk/value/{state}": float(value)
                for state, value in zip(problems.STATES, shown.values.detach(), strict=True)
            },
            **{f"walk/advantage/{state}": value for state, value in path},
            **{f"walk/error/{lam:g}": each.error() for lam, each in self.evaluations.items()},
            **{
                f"walk/lambda/{lam:g}": each.path_advantages()[0]
                for lam, each in self.evaluations.items()
            },
            "walk/policy/value": float(self.turning.values.detach()[middle]),
            "walk/policy/bellman": float(self.turning.bellman()[middle]),
            "walk/policy/right": float(self.turning.right().mean()),
        }


def _descend_values(values: Tensor, walks: Walks, returns: Floats, *, rate: float) -> None:
    """A gradient step of the value loss, averaged over the visits of each state."""
    states = walks.of_steps(walks.states_NT)
    visits = torch.bincount(states, minlength=_STATES).clamp(min=1)
    predicted = values[states]
    old, targets = predicted.detach(), walks.of_steps(returns)
    loss, _ = losses.clipped_value(predicted, old, targets, clip=None)
    (gradient,) = torch.autograd.grad((loss / visits[states]).sum(), values)
    with torch.no_grad():
        values -= rate * gradient
