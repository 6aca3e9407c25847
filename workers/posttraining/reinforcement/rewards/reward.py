"""Reward: scores answers. Score: a number, or the reason of a failure.

Does not depend on how answers are sampled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerToScore:
    """An answer to score: texts of the prompt, the answer and the expected answer; `where` is the
    prompt's line, `ids` are those of prompt and answer with its stop token.
    """

    prompt: str
    text: str
    expected: str | None
    where: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """A reward, or in `failure` why the answer has none."""

    value: float = 0.0
    failure: str = ""


class Reward(ABC):
    """Scores batches of answers; `name` is its curve, `weight` its factor in the sum."""

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight

    @abstractmethod
    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """One score per answer, in their order."""

    def close(self) -> None:
        """End what scoring started."""
        return None


def checked(value: object) -> Score:
    """A finite number as a score; anything else is a failure."""
    if isinstance(value, bool):
        return Score(float(value))
    if not isinstance(value, int | float):
        return Score(failure=f"returned {type(value).__name__} {str(value)[:60]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return Score(number) if math.isfinite(number) else Score(failure=f"returned {number}")
