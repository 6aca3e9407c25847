"""A served model as a judge: its answer's first number, from 0 to 10, divided by 10.

Does not depend on the server's software.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.contracts.specs.finetuning.rewards import JudgeReward
from workers.posttraining.produce.client import ChatClient, Sampling, ServerLost
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score

_REQUESTS = 8  # at a time
_MAX_TOKENS = 64
_FIELD = re.compile(r"\{(prompt|answer|expected)\}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class JudgedReward(Reward):
    """Asks the judge about each answer."""

    def __init__(self, spec: JudgeReward, name: str, *, limit_s: float) -> None:
        """`limit_s`: seconds for a batch. Raises UserError if the key's variable is not set."""
        super().__init__(name, spec.weight)
        self.spec, self.limit_s = spec, limit_s
        self._client = ChatClient(
            ServerSpec(url=spec.url, model=spec.model, key_env=spec.key_env),
            field=name,
        )
        self._pool = ThreadPoolExecutor(_REQUESTS)

    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """One request per answer; a judge that is down, gives no number or is too slow for the
        batch is a failure: the other ranks wait for this one only so long.
        """
        self._client.lost = ""  # it may be back since the last iteration
        pending = [self._pool.submit(self._score, each) for each in answers]
        wait(pending, timeout=self.limit_s)
        late = f"the judge did not score {len(answers)} answers within {self.limit_s:g} s"
        scores = [each.result() if each.done() else Score(failure=late) for each in pending]
        if not all(each.done() for each in pending):
            self._client.lost = late  # ends tries in other threads
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = ThreadPoolExecutor(_REQUESTS)
        return scores

    def close(self) -> None:
        """Close connections."""
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _score(self, answer: AnswerToScore) -> Score:
        values = {
            "prompt": answer.prompt,
            "answer": answer.text,
            "expected": answer.expected or "",
        }
        # in one pass: an answer may contain the names in braces
        content = _FIELD.sub(lambda match: values[match[1]], self.spec.prompt)
        try:
            reply = self._client.complete(
                [{"role": "user", "content": content}],
                Sampling(temperature=0.0, max_tokens=_MAX_TOKENS, seed=0),
            )
        except ServerLost as error:
            return Score(failure=f"the judge: {error}")
        number = _NUMBER.search(reply.text)
        if number is None or float(number[0]) > 10:
            return Score(failure=f"the judge gave no number from 0 to 10: {reply.text[:100]!r}")
        return Score(float(number[0]) / 10)
