"""Sampling parameters of a request, validated when they are created.

Does not depend on logits or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when the answer ends. Raises ValueError that names the parameter.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 truncate nothing; penalties of 1, 0
    and 0 change nothing. `repetition_penalty` divides positive and multiplies negative logits of
    every token in prompt and answer (CTRL, arXiv 1909.05858). `frequency_penalty` is subtracted
    per occurrence in the answer, `presence_penalty` once. `min_p` is a share of the likeliest
    token's probability (arXiv 2407.01082). `logit_bias` is added to the logits of token ids.

    `n` answers share the prompt's cache. `stop_token_ids` end an answer unless `ignore_eos`.
    `logprobs` returns each token's log-probability, `top_logprobs` also those of the likeliest;
    with `scaled_logprobs` the former are those at the temperature.

    `prompt_logprobs` returns the log-probabilities of the prompt's tokens too, each with that many
    of the likeliest; `pooled` returns a scalar head's number at the prompt's last token. Only with
    one of them `max_new_tokens` may be 0.

    `beams` above 1 selects beam search: the `n` best answers by the sum of log-probabilities over
    length ** `length_penalty`; `early_stopping` ends when as many answers as beams are finished.

    At most one of `json_schema` (an object or its text), `regex` (Rust syntax) and `grammar`
    (Lark) constrains the answer.
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
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    scaled_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    pooled: bool = False
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
            if value is None and name == "prompt_logprobs":
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise ValueError(
                    f"{name} is {value!r}; it must be a number from {low:g} to {high:g}"
                )
            if name in _INTEGERS and value != int(value):
                raise ValueError(f"{name} is {value!r}; it must be an integer")
        scores = self.pooled or self.prompt_logprobs is not None
        if self.max_new_tokens == 0 and (not scores or self.n > 1):
            raise ValueError(
                "max_new_tokens is 0; it must be at least 1, except for one answer with "
                "prompt_logprobs"
            )
        if self.top_p == 0:
            raise ValueError("top_p is 0; it must be above 0")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop is {list(self.stop)!r}; it must be a list of non-empty strings")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        constraints = [
            name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None
        ]
        if self.beams > 1:
            self._check_beams(bool(constraints))
        if len(constraints) > 1:
            raise ValueError(
                f"{constraints[0]} and {constraints[1]} are both set; leave one of them out"
            )
        for name in constraints:
            if name != "json_schema" and not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a string")

    def _check_beams(self, constrained: bool) -> None:
        if self.n > self.beams:
            raise ValueError(
                f"n is {self.n}, beams is {self.beams}; n must not exceed beams, try n {self.beams}"
            )
        if not isinstance(self.early_stopping, bool):
            raise ValueError(f"early_stopping is {self.early_stopping!r}; it must be true or false")
        for name, is_set in (
            ("stop", self.stop),
            ("logprobs", self.wants_logprobs),
            ("prompt_logprobs", self.prompt_logprobs is not None),
            ("json_schema, regex", constrained),
        ):
            if is_set:
                raise ValueError(
                    f"beams is {self.beams}; beam search does not support {name}, try beams 1"
                )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature of reported log-probabilities."""
        return self.temperature if self.scaled_logprobs and not self.greedy else 1.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def num_sequences(self) -> int:
        """Sequences that run at a time for this request."""
        return max(self.n, self.beams)

    @property
    def constrained(self) -> bool:
        """Whether the answer must match a schema, regex or grammar."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def adjusts_logits(self) -> bool:
        """Whether bias or penalties change logits."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is set."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def fingerprint(self) -> dict[str, Any]:
        """All parameters, by the names that fingerprints of answer files use."""
        values = asdict(self)
        values["ends"] = values.pop("stop_token_ids")  # version 0.1 wrote `ends`
        if values["prompt_logprobs"] is None:
            del values["prompt_logprobs"]
        if not values["pooled"]:
            del values["pooled"]
        return values


def _bias(value: Any) -> dict[int, float]:
    """`logit_bias` with integer ids; JSON's keys are strings."""
    try:
        biases = {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f'logit_bias is {value!r}; it must map token ids to biases, such as {{"7": -100}}'
        ) from None
    wrong = next((bias for bias in biases.values() if not -_MAX_BIAS <= bias <= _MAX_BIAS), None)
    if wrong is not None:
        raise ValueError(f"logit_bias has {wrong}; a bias must be from {-_MAX_BIAS} to {_MAX_BIAS}")
    return biases


_MAX_BIAS = 100
_INTEGERS = ("max_new_tokens", "top_k", "seed", "n", "top_logprobs", "prompt_logprobs", "beams")
_RANGES = (
    ("max_new_tokens", 0, 2**31 - 1),
    ("temperature", 0, 1e6),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-6, 1e6),  # divided logits stay finite in fp32
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("seed", 0, 2**63 - 1),
    ("n", 1, 128),
    ("top_logprobs", 0, 20),
    ("prompt_logprobs", 0, 20),
    ("beams", 1, 64),
    ("length_penalty", -10, 10),
)
