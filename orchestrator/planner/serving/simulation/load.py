"""The load of a simulated server: when requests arrive, and how long prompts and answers are.

Does not depend on the model or the server.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.model import Positive

MAX_REQUESTS = 5_000
_MAX_TOKENS = 2**24


class Lengths(Contract):
    """Lengths in tokens: log-normal with `mean` and `cv`, within `min` to `max`.

    `cv` is the standard deviation over the mean; 0 means that all are equal. `values` are lengths
    from which each request draws one, instead of `mean` and `cv`.
    """

    mean: Annotated[float, Field(ge=1, le=_MAX_TOKENS)] = 1.0
    cv: Annotated[float, Field(ge=0, le=10)] = 0.0
    min: Positive = 1
    max: Positive = _MAX_TOKENS
    values: (
        Annotated[
            list[Annotated[int, Field(ge=1, le=_MAX_TOKENS)]],
            Field(min_length=1, max_length=MAX_REQUESTS),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise Refused(
                f"min {self.min} is above max {self.max}", f"Use min {self.max}.", field="min"
            )
        return self

    @property
    def mean_tokens(self) -> float:
        """The mean of `values`, else `mean`."""
        return sum(self.values) / len(self.values) if self.values else self.mean

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths of at least 1 token."""
        if self.values is not None:
            drawn = random.choice(np.asarray(self.values, float), count)
        elif self.cv:
            variance = math.log1p(self.cv**2)
            drawn = random.lognormal(
                math.log(self.mean) - variance / 2, math.sqrt(variance), size=count
            )
        else:
            drawn = np.full(count, self.mean)
        lengths: NDArray[np.int64] = np.clip(np.rint(drawn), self.min, self.max).astype(np.int64)
        return lengths


class Load(Contract):
    """Requests and their arrivals.

    `rate` is in requests per second: `poisson` (independent users), `constant` (equal gaps) or
    `gamma` (gaps with the coefficient of variation `cv`; above 1 means bursts). `clients` instead
    of a rate: this many clients that each send their next request when the last one is answered.
    `shared_prefix` tokens are equal in all prompts, for example those of a system prompt.
    """

    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    clients: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    process: Literal["poisson", "constant", "gamma"] = "poisson"
    cv: Annotated[float, Field(gt=0, le=20)] = 2.0
    prompt: Lengths = Lengths(mean=1024)
    output: Lengths = Lengths(mean=256)
    shared_prefix: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] = 0
    requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = 1000
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.rate is None) == (self.clients is None):
            raise Refused("a load has either a rate or clients", "Use rate 2.", field="rate")
        return self

    def arrivals(self, random: np.random.Generator) -> NDArray[np.float64]:
        """Seconds at which requests arrive, ascending, the first at 0; empty for clients."""
        if self.rate is None:
            return np.empty(0)
        count = self.requests - 1
        if self.process == "constant":
            gaps = np.full(count, 1.0)
        elif self.process == "poisson":
            gaps = random.exponential(1.0, count)
        else:
            gaps = random.gamma(1 / self.cv**2, self.cv**2, count)
        return np.concatenate([[0.0], np.cumsum(gaps / self.rate)])


def draw_requests(load: Load, context: int) -> tuple[NDArray[np.float64], list[tuple[int, int]]]:
    """Arrivals in seconds, and (prompt, output) tokens of each request; equal for equal seeds.

    A changed rate moves the arrivals only, so that two rates are compared on the same requests.
    Prompts leave room for one token in `context`, and answers end there.
    """
    # streams of their own: more requests begin with the same ones
    gaps, first, second = (np.random.default_rng([load.seed, part]) for part in range(3))
    prompts = np.minimum(load.prompt.draw(first, load.requests), context - 1)
    outputs = np.minimum(load.output.draw(second, load.requests), context - prompts)
    pairs = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    return load.arrivals(gaps), pairs
