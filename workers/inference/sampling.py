"""How a request's tokens are chosen and when it ends: parameters, checked when they are made.

Knows no logits and no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing off; penalties of 1, 0 and 0 are none.

    `repetition_penalty` divides positive and multiplies negative logits of every token seen, prompt included (CTRL,
    arXiv 1909.05858); `presence_penalty` and `frequency_penalty` are subtracted from tokens of the answer, once and
    for each time. `min_p` is a share of the likeliest token's probability (arXiv 2407.01082). `n` answers share the
    prompt's cache. `ends` stop a request unless `ignore_eos`. Raises ValueError, naming the parameter.
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

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
            if name in _WHOLE and value != int(value):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "top_p" if self.top_p == 0 else "repetition_penalty"
            raise ValueError(f"{name} is 0; it must be above 0")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop is {list(self.stop)!r}; it must be a list of texts that are not empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_WHOLE = ("max_new_tokens", "top_k", "seed", "n")
_RANGES = (
    ("max_new_tokens", 1, 2**31 - 1),
    ("temperature", 0, 1e6),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("seed", 0, 2**63 - 1),
    ("n", 1, 128),
)
