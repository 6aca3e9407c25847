"""ProduceBody: makes fine-tuning data by a served model, filters it, and writes JSON lines.

Fields, defaults and their checks; `workers.posttraining.produce` does the work.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.contracts.specs.model import Count, Positive

TaskType = Literal[
    "open_qa",
    "closed_qa",
    "summarization",
    "extraction",
    "classification",
    "rewriting",
    "brainstorming",
    "code",
    "math",
    "role_play",
    "dialogue",
]
Method = Literal["self_instruct", "evol", "best_of_n", "answer"]
# numbers of an answer: by a model (judge, reward) or by a rule (regex, exact, number)
ScoreKind = Literal["judge", "reward", "regex", "exact", "number"]
FilterKind = Literal["rouge_l", "length", "language", "refusal", "complete", "ngram"] | ScoreKind
WITH_ANSWER = ("exact", "number")  # compare with the seed's `answer`
_Text = Annotated[str, Field(min_length=1, max_length=100_000)]
_Pattern = Annotated[str, Field(min_length=1, max_length=2000)]


def _check_pattern(kind: str, pattern: str | None) -> None:
    if kind != "regex":
        return
    if pattern is None:
        raise Refused("the filter regex needs pattern", "Add pattern.", field="pattern")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused(
            f"{pattern!r} is not a valid regular expression: {error}",
            "Write the pattern in the syntax of Python's re.",
            field="pattern",
        ) from None


class TaskSpec(Contract):
    """A kind of task and its share relative to the other tasks."""

    task_type: TaskType
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        return {"task_type": data} if isinstance(data, str) else data


class ScoreSpec(Contract):
    """How best_of_n compares answers; higher is better.

    judge: 0 to 10 by a chat model; reward: the scalar of a served reward model (`/pooling` as in
    vLLM); regex: 1 if the answer matches `pattern`; exact: 1 if the answer equals the seed's
    `answer` up to case and spaces; number: 1 if the answer's last number is within `tolerance` of
    the seed's.
    """

    kind: ScoreKind = "judge"
    pattern: _Pattern | None = None
    tolerance: Annotated[float, Field(ge=0)] = 1e-6

    @model_validator(mode="after")
    def _complete(self) -> ScoreSpec:
        _check_pattern(self.kind, self.pattern)
        return self


class FilterSpec(Contract):
    """One filter; candidates that it rejects are counted under its `kind`.

    rouge_l: too similar to an earlier instruction (above `threshold`); length: outside `min_chars`
    to `max_chars`; language: letters mostly outside the script `script`; refusal: the answer
    declines; complete: the server cut the answer at its token limit; ngram: shares an n-gram of `n`
    words with a line of the file `against` (decontamination). Scores as in ScoreSpec: regex, exact
    and number reject answers without a match; judge rejects a score below `threshold` of 10, reward
    one below `threshold`.
    """

    kind: FilterKind
    threshold: float | None = None
    min_chars: Count = 1
    max_chars: Positive = 20_000
    script: Literal["latin", "cyrillic", "cjk", "arabic", "greek"] = "latin"
    pattern: _Pattern | None = None
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    n: Annotated[int, Field(ge=2, le=50)] = 13
    against: Annotated[str, Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> FilterSpec:
        _check_pattern(self.kind, self.pattern)
        if self.kind == "ngram" and self.against is None:
            raise Refused("the filter ngram needs against", "Use a text file.", field="against")
        if self.threshold is not None and self.threshold < 0 and self.kind != "reward":
            raise Refused(f"{self.threshold} is below 0", "Use 0 or more.", field="threshold")
        if self.max_chars < self.min_chars:
            raise Refused(
                f"max_chars {self.max_chars} is below min_chars {self.min_chars}",
                "Use a larger number.",
                field="max_chars",
            )
        return self


class ProduceBody(Contract):
    """`count` accepted lines in `output`.

    `seeds` is a file of lines with `prompt` (or messages) that methods start from: answer and
    best_of_n answer them (`samples` candidates each; best_of_n writes the best by `score`, or with
    `writes` preference the best and the worst as a pair), self_instruct invents instructions like
    them, evol makes them harder in `rounds` steps. A dialogue has `turns` questions. Sampling
    follows `temperature`, `top_p` and `max_new_tokens`, with the `system` prompt for answers;
    `concurrency` requests run at a time. `judge` is the server of judge and reward scores, by
    default `server`.
    """

    tasks: Annotated[list[TaskSpec], Field(min_length=1)]
    seeds: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    server: ServerSpec
    judge: ServerSpec | None = None
    method: Method = "self_instruct"
    count: Annotated[int, Field(ge=1, le=10_000_000)]
    samples: Annotated[int, Field(ge=1, le=64)] = 4
    score: ScoreSpec = ScoreSpec()
    writes: Literal["messages", "preference"] = "messages"
    rounds: Annotated[int, Field(ge=1, le=10)] = 1
    turns: Annotated[int, Field(ge=2, le=10)] = 2
    filters: list[FilterSpec] = [
        FilterSpec(kind="length"),
        FilterSpec(kind="complete"),
        FilterSpec(kind="refusal"),
        FilterSpec(kind="rouge_l"),
    ]
    output: Annotated[str, Field(min_length=1, max_length=4096)] = "produced.jsonl"
    system: _Text | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.9
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 512
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    seed: Count = 0

    @model_validator(mode="before")
    @classmethod
    def _needs_seeds(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("seeds") is None:
            method = data.get("method", "self_instruct")
            if method in ("evol", "best_of_n", "answer"):
                raise Refused(f"method {method} needs prompts", "Add seeds.", field="seeds")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> ProduceBody:
        if self.writes == "preference" and self.method != "best_of_n":
            raise Refused(
                f"method {self.method} has one answer per prompt, a pair needs two",
                "Use method best_of_n.",
                field="writes",
            )
        if self.writes == "preference" and self.samples < 2:
            raise Refused("a pair needs two answers", "Use samples 2 or more.", field="samples")
        if self.method in ("self_instruct", "evol"):
            for number, each in enumerate(self.filters):
                if each.kind in WITH_ANSWER:
                    raise Refused(
                        f"new instructions have no known answer, which {each.kind} compares with",
                        "Use method answer or best_of_n with an answer on every seed line.",
                        field=f"filters.{number}.kind",
                    )
        return self

    @property
    def needs_answers(self) -> bool:
        """Whether every seed line needs an `answer`."""
        scored = self.method == "best_of_n" and self.score.kind in WITH_ANSWER
        return scored or any(each.kind in WITH_ANSWER for each in self.filters)

    @property
    def requested_scores(self) -> set[str]:
        """The kinds of scores that the server of scores is asked for: judge, reward."""
        kinds: set[str] = {each.kind for each in self.filters}
        if self.method == "best_of_n":
            kinds.add(self.score.kind)
        return kinds & {"judge", "reward"}

    @property
    def servers(self) -> dict[str, ServerSpec]:
        """The servers by their field."""
        named = {"server": self.server, "judge": self.judge}
        return {name: server for name, server in named.items() if server is not None}
