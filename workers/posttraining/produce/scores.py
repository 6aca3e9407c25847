"""Scores of a candidate: by a judge or a reward model, or by a verifier. Higher is better.

Does not depend on thresholds.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.contracts.specs.finetuning.produce import ScoreKind
from workers.posttraining.produce import tasks
from workers.posttraining.produce.client import ChatClient, Sampling
from workers.runtime.exit_codes import UserError

_JUDGE_TRIES = 3
_MOST_UNCLEAR = 10  # judgments in a row
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A conversation that ends with an answer; `cut` if the answer ended at its token limit.

    `expected` is the known answer to its prompt, if any.
    """

    messages: tuple[Mapping[str, str], ...]
    cut: bool = False
    expected: str | None = None

    @property
    def prompt(self) -> str:
        """All messages of the user."""
        return "\n".join(each["content"] for each in self.messages if each["role"] == "user")

    @property
    def answer(self) -> str:
        """All messages of the assistant."""
        return "\n".join(each["content"] for each in self.messages if each["role"] == "assistant")


class Scorer:
    """Scores by kind; `client` is the server of judge and reward scores. Thread-safe."""

    def __init__(self, client: ChatClient) -> None:
        self.client = client
        self._lock, self._unclear = threading.Lock(), 0

    def score(
        self, kind: ScoreKind, candidate: Candidate, *, pattern: str | None, tolerance: float
    ) -> float | None:
        """None if the judge's answer has no number from 0 to 10 after several tries.

        Raises UserError if that happens many times in a row, and as ChatClient.
        """
        if kind == "judge":
            return self._judge(candidate)
        if kind == "reward":
            return self.client.reward(candidate.messages)
        if kind == "regex":
            return float(re.search(str(pattern), candidate.answer) is not None)
        if kind == "exact":
            return float(_normal(candidate.answer) == _normal(candidate.expected or ""))
        return float(_near(candidate.answer, candidate.expected or "", tolerance))

    def _judge(self, candidate: Candidate) -> float | None:
        request, text = tasks.evaluation(candidate.messages), ""
        for turn in range(_JUDGE_TRIES):
            # the first try is greedy; the same request would give the same text again
            sampling = Sampling(0.0 if turn == 0 else 0.7, 16, turn)
            text = self.client.complete(request, sampling).text
            score = tasks.read_score(text)
            if score is not None:
                with self._lock:
                    self._unclear = 0
                return score
        with self._lock:
            self._unclear += 1
            if self._unclear < _MOST_UNCLEAR:
                return None
        raise UserError(
            f"{self.client.field}: {self.client.model} gave no score from 0 to 10 for "
            f"{_MOST_UNCLEAR} answers in a row, the last: {text[:100]!r}. Use another judge."
        )


def best_and_worst(scores: Sequence[float]) -> tuple[int, int]:
    """The places of the highest and the lowest score; the first of equal ones."""
    places = range(len(scores))
    return max(places, key=lambda place: scores[place]), min(
        places, key=lambda place: scores[place]
    )


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _near(answer: str, expected: str, tolerance: float) -> bool:
    given, known = _last_number(answer), _last_number(expected)
    return (
        given is not None
        and known is not None
        and math.isclose(given, known, rel_tol=0.0, abs_tol=tolerance)
    )


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
