"""Advantages of an iteration's answers: of a whole answer from its group, or of each token by GAE.

Does not depend on how answers are sampled, scored or stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PpoBody
from workers.posttraining.reinforcement.advantages.gae import gae, padded, whiten
from workers.posttraining.reinforcement.advantages.group_advantages import group_advantages
from workers.posttraining.reinforcement.rollouts import Rollout


def log_ratios(rollout: Rollout) -> list[float]:
    """log(policy / reference) of each token, by the trainer if it computed both."""
    policy = rollout.old_logprobs or rollout.logprobs
    reference = rollout.reference_logprobs or policy
    return [ours - theirs for ours, theirs in zip(policy, reference, strict=True)]


def assign_by_group(rollouts: Sequence[Rollout], options: GrpoBody, *, kl_coef: float) -> None:
    """Set the advantage of each answer; `kl_coef` weighs the divergence in its reward, if at all.

    An answer without a reward keeps 0.
    """
    penalized = options.needs_reference and options.kl.estimator == "k1_reward"
    trained = [number for number, each in enumerate(rollouts) if not each.failure]
    rewards = [
        each.reward - (kl_coef * sum(log_ratios(each)) if penalized else 0.0) for each in rollouts
    ]
    advantages = group_advantages(
        [rewards[number] for number in trained],
        [number // options.group_size for number in trained],
        options.algorithm,
        tokens_N=[len(rollouts[number].token_ids) for number in trained],
    )
    for number, advantage in zip(trained, advantages, strict=True):
        rollouts[number].advantage = float(advantage)


def assign_by_token(rollouts: Sequence[Rollout], options: PpoBody, *, kl_coef: float) -> None:
    """Set each token's advantage and return, from rewards and values; whitened over all tokens.

    The reward of an answer belongs to its last token; `kl_coef` times the log-ratio of each token
    is subtracted from that token's reward (arXiv 1909.08593), if `kl.estimator` says so.
    """
    penalized = options.needs_reference and options.kl.estimator == "k1_reward"
    factor = kl_coef if penalized else 0.0
    trained = [each for each in rollouts if not each.failure and each.token_ids]
    if not trained:
        return
    rewards = []
    for each in trained:
        tokens = [-factor * x for x in log_ratios(each)]
        tokens[-1] += each.reward
        rewards.append(tokens)
    rewards_NT, mask_NT = padded(rewards)
    values_NT, _ = padded([each.values or [] for each in trained])
    advantages, returns = gae(
        rewards_NT, values_NT, mask_NT, gamma=options.gae.gamma, lam=options.gae.lam
    )
    whitened = whiten(advantages, mask_NT)
    for row, each in enumerate(trained):
        here = slice(0, len(each.token_ids))
        each.returns = returns[row, here].tolist()
        each.advantages = whitened[row, here].tolist()
        each.advantage = float(np.mean(whitened[row, here]))
