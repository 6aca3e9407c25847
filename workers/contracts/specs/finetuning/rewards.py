"""Rewards of reinforcement learning: the entries of `rewards` in `train.grpo` and `train.ppo`.

Fields, defaults and contradictions between them. Does not hold how answers are scored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.contracts.specs.model import Positive

_Text = Annotated[str, Field(min_length=1, max_length=100_000)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}$")]
# rewards that compare with the `answer` of a line
COMPARING = ("exact", "number", "tests")


class _RewardBase(Contract):
    """`weight` multiplies the reward in the sum; `name` (default: its kind) names its curve."""

    weight: float = 1.0
    name: _Name | None = None


class ExactReward(_RewardBase):
    """1 if the answer equals the line's `answer`, without surrounding whitespace; else 0."""

    kind: Literal["exact"]


class NumberReward(_RewardBase):
    """1 if the last number of the answer is within `tolerance` of the line's `answer`."""

    kind: Literal["number"]
    tolerance: Annotated[float, Field(ge=0)] = 1e-6


class RegexReward(_RewardBase):
    """1 if the answer contains a match of `pattern` (Python syntax)."""

    kind: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=2000)]

    @model_validator(mode="after")
    def _compiles(self) -> RegexReward:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise Refused(
                f"{self.pattern!r} is not a valid regular expression: {error}",
                r"Use a pattern such as \\boxed\{.*\}.",
                field="pattern",
            ) from None
        return self


class JsonSchemaReward(_RewardBase):
    """1 if the answer is JSON that `schema` accepts."""

    kind: Literal["json_schema"]
    schema_: dict[str, Any] = Field(validation_alias="schema", serialization_alias="schema")


class ModelReward(_RewardBase):
    """The score of a reward model that objective `reward` trained, with the policy's tokenizer.

    Either `path`, a folder of weights of which each rank holds a copy, or `run`, a serve run of
    this installation that computes the scores.
    """

    kind: Literal["model"]
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    run: Positive | None = None

    @model_validator(mode="after")
    def _one_model(self) -> ModelReward:
        if (self.path is None) == (self.run is None):
            raise Refused(
                "a reward model is either a folder of weights or a serve run",
                'Use {"kind": "model", "path": "DIR"} or {"kind": "model", "run": 12}.',
            )
        return self

    @property
    def server(self) -> ServerSpec | None:
        """The server that scores; None for a folder of weights."""
        return None if self.run is None else ServerSpec(run=self.run)


class TestsReward(_RewardBase):
    """1 if the answer's Python code passes the line's `answer`, assertions in Python.

    Each runs in a process of its own without network, other processes or files, for at most
    `timeout_s` seconds.
    """

    kind: Literal["tests"]
    timeout_s: Annotated[float, Field(gt=0, le=120)] = 5.0


class JudgeReward(_RewardBase):
    """A score of 0 to 10 by a served chat model, divided by 10.

    `prompt` is a text with {prompt}, {answer} and {expected}. The server is `run`, a serve run of
    this installation, or `url` with `model`, as of produce runs.
    """

    kind: Literal["judge"]
    run: Positive | None = None
    url: Annotated[str, Field(min_length=8, max_length=2000)] | None = None
    model: Annotated[str, Field(min_length=1, max_length=400)] | None = None
    prompt: _Text
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")] | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> JudgeReward:
        _ = self.server  # refuses what is no server
        if "{answer}" not in self.prompt:
            raise Refused(
                "the judge's prompt does not show the answer",
                "Use a text that contains {answer}.",
                field="prompt",
            )
        return self

    @property
    def server(self) -> ServerSpec:
        """The server that judges."""
        return ServerSpec(run=self.run, url=self.url, model=self.model, key_env=self.key_env)


class PythonReward(_RewardBase):
    """The user's `function` in the file `path`, called in a process of its own.

    It takes `prompts`, `answers` and `expected` (lists) and returns one number per answer, within
    `timeout_s` seconds per step.
    """

    kind: Literal["python"]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    function: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "reward"
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0


RewardSpec = Annotated[
    Annotated[ExactReward, Tag("exact")]
    | Annotated[NumberReward, Tag("number")]
    | Annotated[RegexReward, Tag("regex")]
    | Annotated[JsonSchemaReward, Tag("json_schema")]
    | Annotated[ModelReward, Tag("model")]
    | Annotated[TestsReward, Tag("tests")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[PythonReward, Tag("python")],
    Discriminator("kind"),
]
