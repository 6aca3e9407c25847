"""Servers of chat models that a produce run asks: a URL, or a serve run of this installation.

Does not depend on what is asked.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.model import Positive

# variable of a rank with the addresses of serve runs: {run id: {url, model, headers}} as JSON
SERVERS_VARIABLE = "ORRERY_SERVERS"
_Price = Annotated[float, Field(ge=0)]


class ServerSpec(Contract):
    """An OpenAI-compatible API.

    Either `run`, a serve run of this installation, or `url` up to and including /v1. `model` is the
    model's id, by default the run's own. `key_env` names the environment variable on the node that
    holds the API key. Prices are in USD per million tokens.
    """

    run: Positive | None = None
    url: Annotated[str, Field(min_length=8, max_length=2000)] | None = None
    model: Annotated[str, Field(min_length=1, max_length=400)] | None = None
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")] | None = None
    usd_per_million_prompt_tokens: _Price | None = None
    usd_per_million_completion_tokens: _Price | None = None

    @model_validator(mode="after")
    def _one_address(self) -> ServerSpec:
        if (self.run is None) == (self.url is None):
            raise Refused(
                "a server is either a run or a url", 'Use {"run": 12} or {"url": …, "model": …}.'
            )
        if self.url is None:
            if self.key_env is not None:
                raise Refused("a run needs no key", "Remove key_env.", field="key_env")
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused(
                f"{self.url} is not the address of a server",
                "Use http://HOST:PORT/v1.",
                field="url",
            )
        if self.model is None:
            raise Refused("a url needs the model's id", "Use an id of its /models.", field="model")
        return self

    @property
    def label(self) -> str:
        """The server's name in provenance and messages."""
        return f"run {self.run}" if self.run is not None else str(self.url)

    def cost_usd(self, *, prompt_tokens: int, completion_tokens: int) -> float | None:
        """The price of this many tokens; None without prices."""
        prices = self.usd_per_million_prompt_tokens, self.usd_per_million_completion_tokens
        if prices == (None, None):
            return None
        return ((prices[0] or 0.0) * prompt_tokens + (prices[1] or 0.0) * completion_tokens) / 1e6
