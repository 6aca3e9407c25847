"""The rewards of a run, and their weighted sum per answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from workers.contracts.specs.finetuning.reinforcement import PolicyBody
from workers.contracts.specs.finetuning.reinforcement_checks import policy_field
from workers.contracts.specs.finetuning.rewards import (
    ExactReward,
    JsonSchemaReward,
    JudgeReward,
    ModelReward,
    NumberReward,
    PythonReward,
    RegexReward,
    TestsReward,
)
from workers.posttraining.reinforcement.rewards.pattern import PatternReward
from workers.posttraining.reinforcement.rewards.python_function import FunctionReward
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward
from workers.posttraining.reinforcement.rewards.reward_model import ScoredReward
from workers.posttraining.reinforcement.rewards.rules import build_rule
from workers.posttraining.reinforcement.rewards.served.judge import JudgedReward
from workers.posttraining.reinforcement.rewards.served.reward_model import ServedModelReward
from workers.posttraining.reinforcement.rewards.unit_tests import UnitTestReward
from workers.posttraining.reinforcement.rollouts import Rollout
from workers.runtime.exit_codes import UserError

CPU = torch.device("cpu")


def build_rewards(
    options: PolicyBody,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    checkpoints: Path = Path(),
    judge_s: float = 100.0,
    encode: Callable[[str], list[int]] | None = None,
) -> list[Reward]:
    """Every reward of the spec; reward models are on `device` in `dtype` and have the tokenizer in
    `checkpoints`. A server has `judge_s` seconds for a batch; a served reward model must read a
    text as the ids of `encode`. Raises UserError, and OSError as `ServerReward.score`.
    """
    place: dict[str, Any] = {"device": device, "dtype": dtype, "checkpoints": checkpoints}
    built: list[Reward] = []
    try:
        for spec, name in zip(options.rewards, options.reward_names, strict=True):
            if isinstance(spec, ExactReward | NumberReward):
                built.append(build_rule(spec, name))
            elif isinstance(spec, RegexReward | JsonSchemaReward):
                built.append(PatternReward(spec, name))
            elif isinstance(spec, JudgeReward):
                built.append(JudgedReward(spec, name, limit_s=judge_s))
            elif isinstance(spec, ModelReward) and spec.run is not None:
                built.append(ServedModelReward(spec, name, limit_s=judge_s, encode=encode))
            elif isinstance(spec, ModelReward):
                built.append(ScoredReward(spec, name, **place))
            elif isinstance(spec, TestsReward):
                built.append(UnitTestReward(spec, name))
            elif isinstance(spec, PythonReward):
                built.append(FunctionReward(spec, name))
            else:
                raise UserError(f"{name}: this engine has no reward {spec.kind}")
    except (UserError, OSError) as error:
        for each in built:
            each.close()
        if not isinstance(error, UserError):
            raise
        raise UserError(f"train.{policy_field(options)}.rewards: {error}") from None
    return built


def score_rollouts(
    rewards: Sequence[Reward], rollouts: Sequence[Rollout], places: Sequence[str]
) -> None:
    """Set each rollout's rewards and their weighted sum, or its failure; `places` are the prompts'
    lines.
    """
    answers = [
        AnswerToScore(
            each.prompt, each.text, each.expected, where, (*each.prompt_ids, *each.token_ids)
        )
        for each, where in zip(rollouts, places, strict=True)
    ]
    for reward in rewards:
        for rollout, score, answer in zip(rollouts, reward.score(answers), answers, strict=True):
            if score.failure:
                rollout.failure = rollout.failure or (
                    f"{reward.name}: {score.failure} (the prompt of {answer.where})"
                )
            else:
                rollout.rewards[reward.name] = score.value
                rollout.reward += reward.weight * score.value
