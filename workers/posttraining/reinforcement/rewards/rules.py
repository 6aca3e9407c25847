"""Rewards by rules: exact match and numbers.

Each is 1 or 0. Does not depend on models or processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from workers.contracts.specs.finetuning.rewards import (
    ExactReward,
    NumberReward,
)
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

Rule = ExactReward | NumberReward


class RuleReward(Reward):
    """1 where the rule's test holds."""

    def __init__(self, name: str, weight: float, holds: Callable[[AnswerToScore], bool]) -> None:
        super().__init__(name, weight)
        self._holds = holds

    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """1 or 0 per answer."""
        return [Score(float(self._holds(each))) for each in answers]


def build_rule(spec: Rule, name: str) -> RuleReward:
    """The rule's reward."""
    if isinstance(spec, ExactReward):
        return RuleReward(name, spec.weight, _is_exact)
    tolerance = spec.tolerance
    return RuleReward(name, spec.weight, lambda each: _is_number(each, tolerance))


def last_number(text: str) -> float | None:
    """The last number of a text, with commas between thousands; None without one."""
    numbers = _NUMBER.findall(text)
    try:
        return float(numbers[-1].replace(",", "")) if numbers else None
    except ValueError:
        return None


def _is_exact(answer: AnswerToScore) -> bool:
    return answer.text.strip() == (answer.expected or "").strip()


def _is_number(answer: AnswerToScore, tolerance: float) -> bool:
    number, expected = last_number(answer.text), last_number(answer.expected or "")
    return number is not None and expected is not None and abs(number - expected) <= tolerance
