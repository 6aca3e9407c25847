"""A served model as a judge: its answer's first number, from 0 to 10, divided by 10.

Does not depend on the server's software.
"""

from __future__ import annotations

import re

from workers.contracts.specs.finetuning.rewards import JudgeReward
from workers.posttraining.produce.client import Sampling
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Score
from workers.posttraining.reinforcement.rewards.served.server_reward import ServerReward

_MAX_TOKENS = 64
_FIELD = re.compile(r"\{(prompt|answer|expected)\}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class JudgedReward(ServerReward):
    """Asks the judge about each answer."""

    called = "the judge"

    def __init__(self, spec: JudgeReward, name: str, *, limit_s: float) -> None:
        """`limit_s`: seconds for a batch. Raises UserError if the key's variable is not set."""
        super().__init__(spec.server, name, spec.weight, limit_s=limit_s)
        self.spec = spec

    def score_one(self, answer: AnswerToScore) -> Score:
        """A reply without a number from 0 to 10 is a failure."""
        values = {
            "prompt": answer.prompt,
            "answer": answer.text,
            "expected": answer.expected or "",
        }
        # in one pass: an answer may contain the names in braces
        content = _FIELD.sub(lambda match: values[match[1]], self.spec.prompt)
        reply = self.client.complete(
            [{"role": "user", "content": content}],
            Sampling(temperature=0.0, max_tokens=_MAX_TOKENS, seed=0),
        )
        number = _NUMBER.search(reply.text)
        if number is None or float(number[0]) > 10:
            return Score(failure=f"the judge gave no number from 0 to 10: {reply.text[:100]!r}")
        return Score(float(number[0]) / 10)
