"""What the bodies of PPO and GRPO runs require of the run, and their batch."""

from __future__ import annotations

from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.specs.finetuning.reinforcement import HANG_S, GrpoBody, PolicyBody
from workers.contracts.specs.finetuning.rewards import PythonReward
from workers.contracts.specs.plan import ParallelPlan


def with_prompts_per_step(spec: dict[str, Any]) -> dict[str, Any]:
    """A run's document whose `train.ppo` has the prompts that fill the plan's batches, if it names
    no other number.
    """
    train, plan = spec.get("train"), spec.get("plan", {})
    policy = train.get("ppo") if isinstance(train, dict) else None
    if not isinstance(train, dict) or not isinstance(policy, dict):
        return spec
    if policy.get("prompts_per_step") is not None:
        return spec
    try:
        known = plan if isinstance(plan, ParallelPlan) else ParallelPlan.model_validate(plan)
        answers = known.global_batch_size * int(policy.get("minibatches") or 1)
        prompts, rest = divmod(answers, int(policy.get("group_size") or 1))
    except (ValueError, TypeError, ZeroDivisionError):
        return spec  # reported where it is checked
    if rest or prompts < 1:
        return spec
    return {**spec, "train": {**train, "ppo": {**policy, "prompts_per_step": prompts}}}


def policy_field(policy: PolicyBody) -> str:
    """The field of a training body that holds these options: `grpo` or `ppo`."""
    return "grpo" if isinstance(policy, GrpoBody) else "ppo"


def policy_problems(
    policy: PolicyBody, seq_len: int, plan: ParallelPlan | None, *, hang_s: float | None = None
) -> list[Problem]:
    """Contradictions between the options, the sequence length, the plan and the time without
    progress after which a run counts as hanging.
    """
    problems = []
    field = f"train.{policy_field(policy)}"
    limit_s = HANG_S if hang_s is None else hang_s
    for number, reward in enumerate(policy.rewards):
        if isinstance(reward, PythonReward) and reward.timeout_s >= limit_s:
            problems.append(
                problem(
                    f"{field}.rewards.{number}.timeout_s",
                    f"a function may take {reward.timeout_s:g} s, and a run without progress for "
                    f"{limit_s:g} s counts as hanging",
                    f"Use less than {limit_s:g}, or resources.hang_s {2 * reward.timeout_s:g}.",
                )
            )
    if policy.rollout.max_new_tokens >= seq_len:
        problems.append(
            problem(
                f"{field}.rollout.max_new_tokens",
                f"answers of {policy.rollout.max_new_tokens} tokens leave no room for a prompt in "
                f"sequences of {seq_len}",
                f"Use at most {max(1, seq_len // 2)}, or "
                f"seq_len {2 * policy.rollout.max_new_tokens}.",
            )
        )
    if plan is None:
        return problems
    if plan.global_batch_size != policy.rows_per_update:
        problems.append(
            problem(
                "plan.global_batch_size",
                f"an update learns from {policy.rows_per_update} answers (group_size "
                f"{policy.group_size} x prompts_per_step {policy.prompts_per_step} / minibatches "
                f"{policy.minibatches}), the plan's batch has {plan.global_batch_size}",
                f"Use global_batch_size {policy.rows_per_update}.",
            )
        )
    return problems
