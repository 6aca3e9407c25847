"""Rewards by a user's regular expression or JSON schema, each text within a time limit.

Does not depend on how answers are sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonschema import exceptions, validators

from workers.contracts.specs.finetuning.rewards import JsonSchemaReward, RegexReward
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score
from workers.posttraining.reinforcement.rewards.reward_process import RewardProcess
from workers.runtime.exit_codes import UserError

_PROGRAM = Path(__file__).with_name("pattern_process.py")
LIMIT_S = 2.0  # for one text
_TIMEOUTS = 3  # of a batch, after which the rest of it is not tried


class PatternReward(Reward):
    """1 where the pattern matches or the schema accepts; a failure where that takes too long."""

    def __init__(self, spec: RegexReward | JsonSchemaReward, name: str) -> None:
        """Raises UserError for an invalid schema."""
        super().__init__(name, spec.weight)
        rule: Any = spec.pattern if isinstance(spec, RegexReward) else spec.schema_
        if isinstance(spec, JsonSchemaReward):
            try:
                validators.validator_for(rule).check_schema(rule)
            except exceptions.SchemaError as error:
                raise UserError(
                    f'{name}: the schema is invalid: {error.message}. Use {{"type": "object"}}.'
                ) from None
        self.what = "the pattern" if isinstance(spec, RegexReward) else "the schema"
        self._process = RewardProcess(_PROGRAM, [spec.kind, json.dumps(rule)])

    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """1, 0 or a failure per answer."""
        scores: list[Score] = []
        timeouts, problem = 0, ""
        for each in answers:
            if timeouts < _TIMEOUTS:
                reply, problem = self._process.request(each.text, LIMIT_S)
                timeouts += bool(problem)
                if not problem:
                    scores.append(Score(float(bool(reply))))
                    continue
            scores.append(Score(failure=f"{self.what} {problem}"))
        return scores

    def close(self) -> None:
        """End the process."""
        self._process.close()
