"""Columns of a run that samples the texts it learns from: answers, updates, reward models.

0 for other runs. Does not predict memory or time.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planner.model.terms import declare_inputs
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.specs.finetuning.reinforcement import PolicyBody, PpoBody
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

declare_inputs(
    "",
    "train.grpo, train.ppo",
    "rollout_prompts",
    "rollout_group",
    "rollout_updates",
    "rollout_minibatches",
    "rollout_scores_policy",
    "reward_models",
    "rollout_devices",
    "rollout_overlaps",
    "value_parameters_share",
    "value_compute_share",
)
declare_inputs("tokens", "train.grpo.rollout", "rollout_new_tokens")


@dataclass(frozen=True, slots=True)
class Rollouts:
    """An iteration: `group` answers of at most `new_tokens` to each of `prompts`, then `updates`
    from `minibatches` parts of them. `reward_models` are those of which each
    device has a copy: served ones are not among them.
    """

    prompts: int
    group: int
    new_tokens: int
    updates: int
    minibatches: int
    reward_models: int


def rollouts_of(train: TrainBody | None) -> Rollouts | None:
    """The rollouts of a run; None if it learns from data."""
    policy = None if train is None else train.policy
    return None if policy is None else _of_policy(policy)


def rollout_columns(train: TrainBody | None, model: ModelSpec) -> dict[str, float]:
    """The columns of a run; the policy is scored again if an iteration has several updates, a
    decoupled loss, or rewards that subtract a divergence.
    """
    policy = None if train is None else train.policy
    rollouts = rollouts_of(train) or Rollouts(0, 0, 0, 1, 1, 0)
    scores = policy is not None and (
        rollouts.updates > 1
        or policy.staleness.correction == "decoupled"
        or (isinstance(policy, PpoBody) and policy.needs_reference)
    )
    return {
        "rollout_prompts": rollouts.prompts,
        "rollout_group": rollouts.group,
        "rollout_new_tokens": rollouts.new_tokens,
        "rollout_updates": rollouts.updates,
        "rollout_minibatches": rollouts.minibatches,
        "rollout_scores_policy": float(scores),
        "reward_models": rollouts.reward_models,
        "rollout_devices": 0.0 if policy is None else policy.rollout.separate_devices,
        "rollout_overlaps": float(policy is not None and policy.staleness.max > 0),
        **_value_columns(policy, model),
    }


def _value_columns(policy: PolicyBody | None, model: ModelSpec) -> dict[str, float]:
    """The value model's parameters and products relative to the policy's: it has no large head."""
    if not isinstance(policy, PpoBody):
        return {"value_parameters_share": 0.0, "value_compute_share": 0.0}
    count = parameter_count(model)
    table = count.embedding + count.positions
    inner = count.total - table - count.head
    head = count.head or count.embedding
    return {
        "value_parameters_share": (count.total - count.head) / count.total,
        "value_compute_share": inner / (inner + head),
    }


def _of_policy(options: PolicyBody) -> Rollouts:
    return Rollouts(
        prompts=options.prompts_per_step,
        group=options.group_size,
        new_tokens=options.rollout.max_new_tokens,
        updates=options.updates_per_step,
        minibatches=options.minibatches,
        reward_models=sum(each.kind == "model" and each.run is None for each in options.rewards),
    )
