"""Groups of rollouts from sampled answers: their texts and rewards.

Used on training ranks and on rollout ranks. Does not depend on how answers are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PolicyBody
from workers.contracts.specs.finetuning.reinforcement_checks import policy_field
from workers.models.initialize import derived_seed
from workers.models.text.chat_format import ChatFormat
from workers.posttraining.reinforcement.advantages.group_advantages import overlong_penalty
from workers.posttraining.reinforcement.rewards.build import score_rollouts
from workers.posttraining.reinforcement.rewards.reward import Reward
from workers.posttraining.reinforcement.rollouts import Rollout
from workers.posttraining.reinforcement.sampling.prompts import Prompt
from workers.posttraining.reinforcement.sampling.sampler import Answer
from workers.runtime.exit_codes import UserError


def sampling_seed(seed: int, position: int) -> int:
    """The seed of the answers to the prompt at a position of the run."""
    return derived_seed(seed, "rollout", position) >> 11


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """`make` a group from the answers to a prompt, then `rate` its answers."""

    options: PolicyBody
    chat: ChatFormat
    rewards: Sequence[Reward]

    @property
    def penalizes_length(self) -> bool:
        """Whether the algorithm is DAPO."""
        return isinstance(self.options, GrpoBody) and self.options.algorithm == "dapo"

    def make(self, prompt: Prompt, answers: Sequence[Answer], *, step: int) -> list[Rollout]:
        """The group without rewards; `step` is the first update that learns from it."""
        return [
            self._rollout(prompt, number, answer, step) for number, answer in enumerate(answers)
        ]

    def _rollout(self, prompt: Prompt, number: int, answer: Answer, step: int) -> Rollout:
        ids, versions = answer.token_ids, answer.versions
        ended = bool(ids) and ids[-1] in self.chat.stops
        return Rollout(
            step=step,
            prompt_id=prompt.number,
            sample=number,
            prompt_ids=list(prompt.ids),
            token_ids=ids,
            logprobs=answer.logprobs,
            weight_version=min(versions, default=0),
            token_versions=versions if len(set(versions)) > 1 else None,
            prompt=prompt.text,
            text=self.chat.decode(ids[:-1] if ended else ids),
            expected=prompt.expected,
            generation_s=answer.generation_s,
        )

    def rate(self, rollouts: Sequence[Rollout], places: Sequence[str]) -> None:
        """Set rewards; `places` are the prompts' lines.

        Raises UserError if a reward fails and `on_reward_error` says so.
        """
        score_rollouts(self.rewards, rollouts, places)
        if self.penalizes_length:
            longest = self.options.rollout.max_new_tokens
            for each in rollouts:
                each.reward += overlong_penalty(len(each.token_ids), longest=longest)
        failed = next((each for each in rollouts if each.failure), None)
        if failed is not None and self.options.on_reward_error == "fail":
            raise UserError(
                f"train.{policy_field(self.options)}.rewards: {failed.failure}. Fix the "
                "reward, or set on_reward_error to skip to omit such answers."
            )
