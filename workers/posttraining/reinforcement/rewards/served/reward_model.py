"""A served reward model's score of prompt and answer, by their token ids.

Does not depend on the server's software: `/pooling` is vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from workers.contracts.specs.finetuning.rewards import ModelReward
from workers.posttraining.produce.client import ServerLost
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Score, checked
from workers.posttraining.reinforcement.rewards.served.server_reward import ServerReward
from workers.runtime.exit_codes import UserError

# words, digits, punctuation and a character of 2 bytes; short, as contexts of bytes may be
_PROBE = "Add 8.5 to é!"
_TOLERANCE = 1e-2  # of scores in 16 bits
# how Orrery's server and vLLM refuse ids that the model does not have
_UNKNOWN_IDS = ("the model's ids are 0 to", "outside", "vocab")


class ServedModelReward(ServerReward):
    """Sends ids, so that no text is encoded again."""

    called = "the reward model"

    def __init__(
        self,
        spec: ModelReward,
        name: str,
        *,
        limit_s: float,
        encode: Callable[[str], list[int]] | None,
    ) -> None:
        """`encode` is the policy's tokenizer. Raises UserError for a server of another tokenizer,
        and ServerLost or RunServerLost for one that gives no score.
        """
        assert spec.server is not None
        super().__init__(spec.server, name, spec.weight, limit_s=limit_s)
        if encode is not None:
            self._check_tokenizer(spec, encode(_PROBE))

    def score_one(self, answer: AnswerToScore) -> Score:
        """A refusal, such as of an answer longer than the model's context, is a failure of this
        answer alone.
        """
        try:
            return checked(self.client.pooled(list(answer.ids)))
        except UserError as error:
            return Score(failure=str(error))

    def _check_tokenizer(self, spec: ModelReward, ids: list[int]) -> None:
        """A text has the score of its ids only if the server reads it as the same ids."""
        late = f"it did not score a short text within {self.limit_s:g} s"
        acts = [partial(self.client.pooled, each) for each in (_PROBE, ids)]
        try:
            by_text, by_ids = self.in_time(acts, late)
        except ServerLost as error:
            raise self.lost(error) from None
        except UserError as error:
            if not any(words in str(error) for words in _UNKNOWN_IDS):
                raise
            by_text, by_ids = 0.0, math.inf
        if by_text is None or by_ids is None:
            raise self.lost(ServerLost(late))
        if not math.isclose(by_text, by_ids, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE / 10):
            raise UserError(
                f"{self.name}: the reward model of run {spec.run} has another tokenizer than the "
                "policy. Use a reward model with the policy's tokenizer."
            )
