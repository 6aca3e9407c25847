"""A judge's choices between the answers of two models: of a chat model, asked in both orders, or
by the scores of a reward model.

Does not depend on how answers are made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.posttraining.produce.client import ChatClient, Sampling, ServerLost
from workers.runtime.exit_codes import UserError

_AT_A_TIME = 8
_CHOICE = re.compile(r"\b([AB]|TIE)\b")
_REQUEST = (
    "Two assistants answered the same request. Which answer is better: more correct, more helpful "
    "and following the request more closely? Ignore the order and the length of the answers.\n\n"
    "[Request]\n{prompt}\n\n[Answer A]\n{a}\n\n[Answer B]\n{b}\n\n"
    "Reply with one word: A, B or TIE."
)


class Judge:
    """Asks an OpenAI-compatible server. Raises UserError if it refuses, or gives no answer."""

    def __init__(self, server: ServerSpec) -> None:
        self._client = ChatClient(server, field="evaluate.judge")

    def choose(self, pairs: Sequence[tuple[str, str, str]]) -> list[str]:
        """`win`, `loss` or `tie` of the second answer of each `(prompt, before, after)`.

        A choice counts only if it is the same in both orders; others are ties.
        """
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return list(pool.map(self._choose, pairs))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _choose(self, pair: tuple[str, str, str]) -> str:
        prompt, before, after = pair
        if before == after:
            return "tie"
        return self._prefer(prompt, before, after)

    def _prefer(self, prompt: str, before: str, after: str) -> str:
        first, second = self._request(prompt, before, after), self._request(prompt, after, before)
        if (first, second) == ("B", "A"):
            return "win"
        return "loss" if (first, second) == ("A", "B") else "tie"

    def _request(self, prompt: str, a: str, b: str) -> str:
        text = _REQUEST.format(prompt=prompt, a=a, b=b)
        try:
            reply = self._client.complete(
                [{"role": "user", "content": text}], Sampling(0.0, 8, 0)
            ).text
        except ServerLost as error:
            raise UserError(f"evaluate.judge: {error}. Try again when it serves.") from None
        choice = _CHOICE.search(reply.upper())
        return choice[1] if choice else "TIE"


class RewardJudge(Judge):
    """Prefers the answer to which a served reward model gives the higher score."""

    def _prefer(self, prompt: str, before: str, after: str) -> str:
        first, second = self._score(prompt, before), self._score(prompt, after)
        return "tie" if first == second else "win" if second > first else "loss"

    def _score(self, prompt: str, answer: str) -> float:
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ]
        try:
            return self._client.reward(messages)
        except ServerLost as error:
            raise UserError(f"evaluate.judge: {error}. Try again when it serves.") from None


def open_judge(server: ServerSpec, by: Literal["choice", "reward"]) -> Judge:
    """The judge that a run asks."""
    return RewardJudge(server) if by == "reward" else Judge(server)
