"""Chat completions of an OpenAI-compatible server, with retries and clear reasons.

Does not depend on what is asked.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from workers.contracts.specs.finetuning.chat_servers import SERVERS_VARIABLE, ServerSpec
from workers.runtime.exit_codes import UserError

TRIES = 6
_TIMEOUT_S = 600.0
_LAST_WAIT_S = 30.0
Messages = Sequence[Mapping[str, str]]
Value = TypeVar("Value")


class ServerLost(ConnectionError):
    """The server did not answer usefully after all tries."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a server samples an answer."""

    temperature: float
    max_tokens: int
    seed: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's text; `cut` if it ended at its token limit."""

    text: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class _Address:
    url: str
    model: str
    headers: dict[str, str]


class ChatClient:
    """Thread-safe; `wait` sleeps between tries (1, 2, 4 … seconds).

    `prompt_tokens` and `completion_tokens` are totals as the server reports them; `answered` is
    whether it has ever given a usable answer, `lost` says that it gave none in all
    tries.
    """

    def __init__(
        self,
        server: ServerSpec,
        *,
        field: str = "produce.server",
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises UserError for a run without an address and a key that is not set."""
        self.server, self.field, self._wait = server, field, wait
        self._address = _address(server, field)
        self._http = httpx.Client(
            headers=self._address.headers,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=10),
            trust_env=server.run is None,  # nodes reach each other without a proxy
        )
        self._lock = threading.Lock()
        self.prompt_tokens = self.completion_tokens = 0
        self.answered, self.lost = False, ""

    @property
    def model(self) -> str:
        """The model's id."""
        return self._address.model

    @property
    def cost_usd(self) -> float | None:
        """The price of the tokens so far; None without prices."""
        return self.server.cost_usd(
            prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens
        )

    def complete(self, messages: Messages, sampling: Sampling) -> Reply:
        """The server's answer. Raises UserError if it refuses the request, and ServerLost."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed % 2**31,
        }
        return self._request("chat/completions", body, _reply, "chat completion")

    def reward(self, messages: Messages) -> float:
        """The scalar that a reward model gives a conversation (`/pooling` as in vLLM).

        Raises as `complete`.
        """
        return self._pooling({"messages": list(messages)})

    def pooled(self, text: str | list[int]) -> float:
        """The scalar that a reward model gives a text or token ids. Raises as `complete`."""
        # a list of one: vLLM reads a flat list of numbers as ids as well, other servers as batch
        return self._pooling({"input": text if isinstance(text, str) else [text]})

    def _pooling(self, fields: dict[str, Any]) -> float:
        # vLLM's default is a sigmoid of the score
        body = {"model": self.model, **fields, "use_activation": False}
        return self._request("pooling", body, _scalar, "reward")

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _request(
        self, path: str, body: dict[str, Any], read: Callable[[Any], Value | None], expected: str
    ) -> Value:
        base = self._address.url.rstrip("/")
        # vLLM serves /pooling next to /v1
        url = f"{base}/{path}" if path != "pooling" else f"{base.removesuffix('/v1')}/{path}"
        reason = ""
        for turn in range(TRIES):
            if self.lost:  # another thread has tried long enough
                raise ServerLost(self.lost)
            if turn:
                self._wait(min(_LAST_WAIT_S, 2.0 ** (turn - 1)))
            try:
                response = self._http.post(url, json=body)
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                continue
            # while a run's server changes its attempt, another program may have its port
            if response.status_code in (400, 401, 403, 404, 422) and not (
                self.server.run is not None and response.status_code in (401, 403, 404)
            ):
                raise UserError(
                    f"{self.field}: {url} refuses with {response.status_code}: "
                    f"{response.text[:300]}. Use another model, key or url."
                )
            if response.status_code != 200:
                reason = f"status {response.status_code}: {response.text[:200]}"
                continue
            try:
                document = response.json()
            except ValueError:
                document = None
            value = read(document)
            if value is not None:
                self._count(document)
                return value
            reason = f"the answer is no {expected}: {response.text[:200]}"
        self.lost = f"{url} gave no usable answer in {TRIES} tries; the last: {reason}"
        raise ServerLost(self.lost)

    def _count(self, document: Any) -> None:
        usage = document.get("usage") if isinstance(document, dict) else None
        prompt, completion = (
            value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
            for value in (
                (usage.get("prompt_tokens"), usage.get("completion_tokens"))
                if isinstance(usage, dict)
                else (0, 0)
            )
        )
        with self._lock:
            self.prompt_tokens += prompt
            self.completion_tokens += completion
            self.answered = True


def _address(server: ServerSpec, field: str) -> _Address:
    if server.run is not None:
        try:
            known = json.loads(os.environ.get(SERVERS_VARIABLE, "{}"))[str(server.run)]
            return _Address(known["url"], server.model or known["model"], dict(known["headers"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{field}.run: this program does not know the address of run {server.run}. "
                "Submit the run to the control plane, or set url."
            ) from None
    key = os.environ.get(server.key_env) if server.key_env else None
    if server.key_env and not key:
        raise UserError(
            f"{field}.key_env: {server.key_env} is not set on this node. Set it "
            "in the agent's environment and list it in ORRERY_RUN_ENV."
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return _Address(str(server.url), str(server.model), headers)


def _reply(document: Any) -> Reply | None:
    try:
        choice = document["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    if not isinstance(text, str):
        return None
    return Reply(text.strip(), cut=choice.get("finish_reason") == "length")


def _scalar(document: Any) -> float | None:
    """The only number of a pooling answer: `data[0].data` is it, or a list with it."""
    try:
        value = document["data"][0]["data"]
    except (KeyError, IndexError, TypeError):
        return None
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
