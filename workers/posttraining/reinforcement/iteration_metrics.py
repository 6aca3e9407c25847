"""Numbers of an iteration's answers: rewards, groups, lengths, and values with their returns.

Pure functions of rollouts. Does not depend on how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.contracts.specs.finetuning.reinforcement import PolicyBody
from workers.posttraining.reinforcement.advantages.gae import explained_variance
from workers.posttraining.reinforcement.advantages.group_advantages import are_equal
from workers.posttraining.reinforcement.rollouts import Rollout


def is_equal(group: Sequence[Rollout]) -> bool:
    """Whether nothing can be learned from a group's rewards."""
    rewards = [each.reward for each in group if not each.failure]
    return not rewards or are_equal(rewards)


def iteration_metrics(
    rollouts: Sequence[Rollout], options: PolicyBody, stops: Sequence[int]
) -> dict[str, float]:
    """`reward/…`, `groups/…`, `value/…` and lengths, over answers with a reward.

    `groups/std` is the mean over groups of the rewards' standard deviation, `groups/best` that of
    the best reward; of groups of one answer there are none.
    """
    scored = [each for each in rollouts if not each.failure]
    values = {"reward/failed": float(len(rollouts) - len(scored))}
    if scored:
        rewards = np.asarray([each.reward for each in scored])
        values |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for name in options.reward_names:
            parts = [each.rewards[name] for each in scored if name in each.rewards]
            values[f"reward/{name}"] = float(np.mean(parts)) if parts else 0.0
    lengths = [len(each.token_ids) for each in rollouts]
    cut = [each.token_ids[-1:] != [] and each.token_ids[-1] not in stops for each in rollouts]
    return (
        values
        | _group_metrics(rollouts, options.group_size)
        | _value_metrics(scored)
        | _staleness_metrics(rollouts, options)
        | {
            "response_tokens": float(np.mean(lengths)),
            "response_tokens/longest": float(max(lengths)),
            "response_tokens/cut_fraction": float(np.mean(cut)),
        }
    )


def _group_metrics(rollouts: Sequence[Rollout], size: int) -> dict[str, float]:
    if size == 1:
        return {}
    groups = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
    rewards = [[each.reward for each in group if not each.failure] for group in groups]
    scored = [each for each in rewards if each]
    values = {"groups/equal": float(np.mean([is_equal(group) for group in groups]))}
    if scored:
        values["groups/std"] = float(np.mean([np.std(each) for each in scored]))
        values["groups/best"] = float(np.mean([max(each) for each in scored]))
    return values


def _value_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How well the values at the start of the iteration explain the returns."""
    values = np.asarray([x for each in rollouts for x in each.values or ()])
    returns = np.asarray([x for each in rollouts for x in each.returns or ()])
    if not len(values):
        return {}
    return {
        "value/explained_variance": explained_variance(values, returns),
        "value/return": float(returns.mean()),
    }


def _staleness_metrics(rollouts: Sequence[Rollout], options: PolicyBody) -> dict[str, float]:
    """How many updates the weights of the sampled tokens are older than those that learn first."""
    if not options.rollout.separate_devices:
        return {}
    ages = np.asarray(
        [
            each.step - 1 - version
            for each in rollouts
            for version in each.token_versions or [each.weight_version] * len(each.token_ids)
        ]
    )
    versions = [len(set(each.token_versions or [0])) for each in rollouts]
    return {
        "staleness": float(ages.mean()) if len(ages) else 0.0,
        "staleness/longest": float(ages.max()) if len(ages) else 0.0,
        "staleness/versions": float(np.mean(versions)),
        "staleness/interrupted": float(np.mean([each > 1 for each in versions])),
    }
