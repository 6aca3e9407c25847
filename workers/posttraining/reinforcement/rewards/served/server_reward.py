"""Rewards that a server computes, some answers at a time.

Does not depend on what is requested.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.posttraining.produce.client import ChatClient, ServerLost
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score
from workers.runtime.exit_codes import RunServerLost

_REQUESTS = 8  # at a time
T = TypeVar("T")


class ServerReward(Reward):
    """One request per answer; `called` names the server in failures."""

    called = "the server"

    def __init__(self, server: ServerSpec, name: str, weight: float, *, limit_s: float) -> None:
        """`limit_s`: seconds for a batch. Raises UserError for a key that is not set."""
        super().__init__(name, weight)
        self.limit_s = limit_s
        self.client = ChatClient(server, field=name)
        self._pool = ThreadPoolExecutor(_REQUESTS)

    @abstractmethod
    def score_one(self, answer: AnswerToScore) -> Score:
        """The server's score of an answer. Raises ServerLost, and UserError if it refuses."""

    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """A server that is down, answers nonsense or is too slow for the batch is a failure: the
        other ranks wait for this one only so long.

        A serve run that does not answer may have a new address, which only a new attempt gets:
        raises RunServerLost, or ServerLost if it has never answered.
        """
        late = f"{self.called} did not score {len(answers)} answers within {self.limit_s:g} s"
        scores = self.in_time([partial(self._score, each) for each in answers], late)
        return [each or Score(failure=late) for each in scores]

    def in_time(self, acts: Sequence[Callable[[], T]], late: str) -> list[T | None]:
        """The results of `acts`, and None for those that take longer than `limit_s`, whose requests
        end with the reason `late`. Raises the first act's error.
        """
        self.client.lost = ""  # it may be back since the last iteration
        pending = [self._pool.submit(each) for each in acts]
        done, waiting = wait(pending, timeout=self.limit_s)
        if waiting:
            self.client.lost = late  # ends tries in other threads
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = ThreadPoolExecutor(_REQUESTS)
        return [each.result() if each in done else None for each in pending]

    def close(self) -> None:
        """Close connections."""
        self._pool.shutdown(cancel_futures=True)
        self.client.close()

    def _score(self, answer: AnswerToScore) -> Score:
        try:
            return self.score_one(answer)
        except ServerLost as error:
            if self.client.server.run is not None:
                raise self.lost(error) from None
            return Score(failure=f"{self.called}: {error}")

    def lost(self, error: ServerLost) -> ServerLost | RunServerLost:
        """The error that ends an attempt without its serve run."""
        message = f"{self.name}: {self.called} of run {self.client.server.run}: {error}"
        return RunServerLost(message) if self.client.answered else ServerLost(message)
