"""The five-armed bandit: the optimum by each estimator of the penalty, and estimated gradients.

Learns with the functions that train language models; exact answers are in the contracts' catalog.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.contracts.catalog import solved_problems as problems
from workers.posttraining.reinforcement.advantages.group_advantages import group_advantages
from workers.posttraining.solved_problems.moments import Moments
from workers.training.objectives import policy_losses as losses

_REFERENCE = torch.tensor(problems.REFERENCE, dtype=torch.float64).log()
_REWARDS = torch.tensor(problems.REWARDS, dtype=torch.float64)
_EXACT_UPDATES, _EXACT_RATE = 3, 0.3  # per step
_EPOCHS, _ANSWERS = 4, 256
_DRAWS = 4096  # per step, for estimates
_CLIP = {"low": problems.CLIP, "high": problems.CLIP}


class ExactPolicy:
    """Follows the exact expectation of the loss, so only the estimator decides where it ends."""

    def __init__(self, estimator: str) -> None:
        self.estimator = estimator
        self.logits = _REFERENCE.clone()

    def learn(self) -> None:
        """One gradient step over all arms, each by its probability."""
        logits = self.logits.detach().requires_grad_()
        logp = logits.log_softmax(0)
        policy = logp.exp().detach()
        reward = _REWARDS
        if self.estimator == "k1_reward":
            reward = reward - problems.BETA * losses.k1(logp, _REFERENCE).detach()
        advantage = reward - (policy * reward).sum()
        log_ratio = logp - logp.detach()
        penalty = losses.penalty(self.estimator, logp, _REFERENCE, log_ratio)
        loss = losses.clipped(log_ratio, advantage, **_CLIP) + problems.BETA * penalty
        (gradient,) = torch.autograd.grad((policy * loss).sum(), logits)
        self.logits = (logits - _EXACT_RATE * gradient).detach()

    def probabilities(self) -> list[float]:
        """The policy."""
        return [float(each) for each in self.logits.softmax(0)]


class SampledPolicy:
    """Learns from sampled arms, with the divergence in the reward, by one gradient estimator."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.logits = _REFERENCE.clone()

    def learn(self, generator: torch.Generator, *, rate: float) -> None:
        """One batch of arms and its updates: `ppo` learns from the same arms several times."""
        old = self.logits.log_softmax(0)
        arms = torch.multinomial(old.exp(), _ANSWERS, replacement=True, generator=generator)
        rewards = (_REWARDS - problems.BETA * losses.k1(old, _REFERENCE))[arms]
        advantages = rewards
        if self.method != "reinforce":
            groups, tokens = [0] * _ANSWERS, [1] * _ANSWERS
            centered = group_advantages(rewards.numpy(), groups, "rloo", tokens_N=tokens)
            advantages = torch.from_numpy(centered)
        epochs = _EPOCHS if self.method == "ppo" else 1
        for _ in range(epochs):
            logits = self.logits.detach().requires_grad_()
            logp = logits.log_softmax(0)[arms]
            if self.method == "ppo":
                loss = losses.clipped(logp - old[arms], advantages, **_CLIP)
            else:
                loss = -logp * advantages
            (gradient,) = torch.autograd.grad(loss.mean(), logits)
            self.logits = (logits - rate / epochs * gradient).detach()

    def objective(self) -> float:
        """The exact objective of the policy."""
        return problems.objective([float(each) for each in self.logits.softmax(0)])


class Gradients:
    """Estimates of one entry of a gradient, from arms of the policy or of the sampler."""

    def __init__(self) -> None:
        self.policy = torch.tensor(problems.shifted_policy(), dtype=torch.float64)
        self.sampler = _REFERENCE.exp()
        self.moments = {name: Moments() for name in problems.GRADIENTS}
        self.estimates = {name: self._of_arms(name) for name in problems.GRADIENTS}

    def draw(self, generator: torch.Generator) -> None:
        """Add the estimates of new samples."""
        for name, moments in self.moments.items():
            own = name in ("reinforce", "baseline")
            moments.add(
                self.estimates[name], _counts(self.policy if own else self.sampler, generator)
            )

    def _of_arms(self, name: str) -> Tensor:
        """The estimate if each of the arms is sampled, by backpropagation through its loss."""
        own = name in ("reinforce", "baseline")
        sampler = self.policy if own else self.sampler
        baseline = 0.0 if name == "reinforce" else float((sampler * _REWARDS).sum())
        advantages = _REWARDS - baseline
        limits = _CLIP if name == "ppo" else {"low": 1.0, "high": float("inf")}

        def of_logits(logits: Tensor) -> Tensor:
            log_ratio = logits.log_softmax(0) - sampler.log()
            return -losses.clipped(log_ratio, advantages, **limits)

        return _by_best_arm(of_logits, self.policy.log())


class Divergences:
    """k1, k2 and k3 of arms that the optimum samples."""

    def __init__(self) -> None:
        self.policy = torch.tensor(problems.bandit_optimum(), dtype=torch.float64)
        self.moments = {name: Moments() for name in problems.DIVERGENCES}
        logp = self.policy.log()
        formulas = {"k1": losses.k1, "k2": losses.k2, "k3": losses.k3}
        self.estimates = {name: each(logp, _REFERENCE) for name, each in formulas.items()}

    def draw(self, generator: torch.Generator) -> None:
        """Add the estimates of new samples; all three see the same ones."""
        counts = _counts(self.policy, generator)
        for name, moments in self.moments.items():
            moments.add(self.estimates[name], counts)


class BanditProblem:
    """Policies by exact expectations and from samples, and the estimators themselves."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.exact = {name: ExactPolicy(name) for name in problems.KL_ESTIMATORS}
        self.sampled = {name: SampledPolicy(name) for name in problems.SAMPLED_GRADIENTS}
        self.gradients, self.divergences = Gradients(), Divergences()

    def step(self, number: int) -> dict[str, float]:
        """Learn and draw; the metrics of the step."""
        for policy in self.exact.values():
            for _ in range(_EXACT_UPDATES):
                policy.learn()
        for sampled in self.sampled.values():
            sampled.learn(self.generator, rate=60 / (number + 120))
        self.gradients.draw(self.generator)
        self.divergences.draw(self.generator)
        optimum = self.exact["k1_reward"].probabilities()
        return {
            **{
                f"bandit/objective/{name}": problems.objective(policy.probabilities())
                for name, policy in self.exact.items()
            },
            **{f"bandit/arm/{arm}": p for arm, p in zip(problems.ARMS, optimum, strict=True)},
            **{f"bandit/sampled/{name}": each.objective() for name, each in self.sampled.items()},
            **_moments("gradient", self.gradients.moments),
            **_moments("divergence", self.divergences.moments),
        }


def _moments(what: str, moments: dict[str, Moments]) -> dict[str, float]:
    means = {f"bandit/{what}/{name}": each.mean() for name, each in moments.items()}
    return {**means, **{f"bandit/{what}_std/{name}": each.std() for name, each in moments.items()}}


def _counts(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """How often each arm is drawn."""
    arms = torch.multinomial(probabilities, _DRAWS, replacement=True, generator=generator)
    return torch.bincount(arms, minlength=len(probabilities))


def _by_best_arm(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """The derivatives of a function's values by the logit of the best arm."""
    leaf = logits.detach().requires_grad_()
    values = function(leaf)
    gradients = [torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in values]
    return torch.stack(gradients)[:, problems.BEST]
