"""How a request's tokens are chosen and when it ends: parameters, checked when they are made.

Knows no logits and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing off; penalties of 1,
    0 and 0 are none.

    `repetition_penalty` divides positive and multiplies negative logits of every token seen, prompt
    included (CTRL,
    arXiv 1909.05858); `presence_penalty` and `frequency_penalty` are subtracted from tokens of the
    answer, once and
    for each time. `min_p` is a share of the likeliest token's probability (arXiv 2407.01082). `n`
    answers share the
    prompt's cache. `ends` stop a request unless `ignore_eos`. `logit_bias` is added to the logits
    of token ids.
    `logprobs` tells each token's, `top_logprobs` besides so many of the likeliest. Raises
    ValueError, naming the
    parameter.

    With `beams` above 1 the `n` likeliest answers of so many beams are given, by the sum of
    log-probabilities over the
    length to the power of `length_penalty`; `early_stopping` ends when as many have ended as there
    are beams.

    An answer keeps to `json_schema` (an object, or its text), `regex` (Rust's), or `grammar`
    (Lark): one of them.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise ValueError(
                    f"{name} is {value!r}; it must be a number from {low:g} to {high:g}"
                )
            if name in _WHOLE and value != int(value):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        if self.top_p == 0:
            raise ValueError("top_p is 0; it must be above 0")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(
                f"stop is {list(self.stop)!r}; it must be a list of texts that are not empty"
            )
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        forms = [
            name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None
        ]
        if self.beams > 1:
            self._check_beams(bool(forms))
        if len(forms) > 1:
            raise ValueError(
                f"{forms[0]} and {forms[1]} are given; an answer keeps to one form, leave one out"
            )
        for name in forms:
            if name != "json_schema" and not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a text")

    def _check_beams(self, constrained: bool) -> None:
        if self.n > self.beams:
            raise ValueError(
                f"n is {self.n}, beams {self.beams}; there are as many answers as beams, try n "
                f"{self.beams}"
            )
        if not isinstance(self.early_stopping, bool):
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be true or false")
        for name, given in (
            ("stop", self.stop),
            ("logprobs", self.tells),
            ("json_schema, regex", constrained),
        ):
            if given:
                raise ValueError(f"beams is {self.beams}; beams go without {name}, try beams 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def tells(self) -> bool:
        return self.logprobs or self.top_logprobs > 0

    @property
    def sequences(self) -> int:
        """How many run at a time for this request."""
        return max(self.n, self.beams)

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def adjusts(self) -> bool:
        return self.penalises or bool(self.logit_bias)

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _bias(given: Any) -> dict[int, float]:
    """JSON's keys are texts."""
    try:
        found = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f'logit_bias is {given!r}; it must give token ids their bias, as {{"7": -100}}'
        ) from None
    wrong = next(
        (value for value in found.values() if not -_MOST_BIAS <= value <= _MOST_BIAS), None
    )
    if wrong is not None:
        raise ValueError(
            f"logit_bias has {wrong}; a bias must be from {-_MOST_BIAS} to {_MOST_BIAS}"
        )
    return found


_MOST_BIAS = 100
_WHOLE = ("max_new_tokens", "top_k", "seed", "n", "top_logprobs", "beams")
_RANGES = (
    ("max_new_tokens", 1, 2**31 - 1),
    ("temperature", 0, 1e6),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-6, 1e6),  # logits that it divides stay finite in fp32
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("seed", 0, 2**63 - 1),
    ("n", 1, 128),
    ("top_logprobs", 0, 20),
    ("beams", 1, 64),
    ("length_penalty", -10, 10),
)
