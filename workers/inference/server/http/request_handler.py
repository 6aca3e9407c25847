"""Handles requests: parsed JSON to prompts in token ids, checked, and submitted to the engine.

Does not depend on HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workers.contracts.wire.serving_reports import STATE_PATH, EngineState
from workers.inference.engine import check_prompt
from workers.inference.model_loading import LoadedModel
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.server.async_engine import AsyncEngine
from workers.inference.server.http.admission import Admission
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.request_parsing import (
    ParsedRequest,
    parse_body,
    parse_messages,
    parse_prompts,
    value_error,
)
from workers.inference.server.http.schemas import model_card
from workers.inference.server.observe.engine_state import merge_states
from workers.inference.server.replicas.router import ReplicaRouter
from workers.inference.server.replicas.stats import ReplicaStatsCollector
from workers.inference.server.token_stream import TokenStream
from workers.models.errors import WeightsError

_LONG_TEXT = 4_000  # characters: longer ones are tokenized in a thread, not to block other streams


class RequestHandler:
    """Requests to one engine; `names` are the names of the model, the first is the official one."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: AsyncEngine,
        admission: Admission,
        *,
        names: Sequence[str],
    ) -> None:
        self.loaded, self.engine, self.admission = loaded, engine, admission
        self.names = tuple(names)
        # set on the first of several replicas
        self.router: ReplicaRouter | None = None
        self.replica_stats: ReplicaStatsCollector | None = None
        self.created = int(time.time())
        self.context = loaded.spec.max_seq_len
        pool = engine.engine.scheduler.pool
        self._max_tokens = min(self.context, pool.blocks * pool.block_size)

    @property
    def supports_chat(self) -> bool:
        """Whether the model has a chat template."""
        return getattr(self.loaded.tokenizer, "chat_template", None) is not None

    @property
    def forwarded(self) -> int:
        """Answers in progress in other processes."""
        return 0 if self.router is None else self.router.forwarded

    def models(self) -> list[dict[str, Any]]:
        """The data of /v1/models."""
        return [model_card(self.names[0], created=self.created, context=self.context)]

    def check_model(self, name: Any) -> None:
        """Raises ApiError 404 for another model's name."""
        if name not in self.names:
            message = f"The model `{name}` does not exist; this server has {self.names[0]}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    async def parse(self, body: Any, *, chat: bool) -> ParsedRequest:
        """Check everything that does not need the engine. Raises ApiError."""
        parsed = parse_body(body, chat=chat)
        self.check_model(parsed.fields.get("model", self.names[0]))
        prompts, prefixes = await self._tokenize(parsed)
        await self._compile_guide(parsed)
        samplings = tuple(self._sampling(parsed, prompt) for prompt in prompts)
        return replace(
            parsed, prompts=tuple(prompts), prefixes=tuple(prefixes), samplings=samplings
        )

    async def submit(self, parsed: ParsedRequest, client: str = "") -> TokenStream:
        """A stream that the engine has accepted; the caller closes it. Raises ApiError."""
        stream = TokenStream(
            parsed, model=self.names[0], tokenizer=self.loaded.tokenizer, client=client
        )
        try:
            stream.resources.enter_context(self.admission.reserve(parsed.answers))
            stream.resources.callback(self.engine.cancel, stream)
            await self.engine.submit(stream)
        except ValueError as error:
            stream.close()
            raise value_error(error) from None
        except BaseException:
            stream.close()
            raise
        return stream

    async def state(self) -> EngineState:
        """The state of all replicas that answer. Raises TimeoutError if a step takes long."""
        own = await self.engine.state(draining=self.admission.draining)
        if self.router is None:
            return own
        answers = await asyncio.gather(
            *(upstream.get_json(STATE_PATH) for upstream in self.router.upstreams),
            return_exceptions=True,
        )
        others = [
            EngineState.model_validate(answer) for answer in answers if isinstance(answer, dict)
        ]
        return merge_states([own, *others])

    async def _tokenize(self, parsed: ParsedRequest) -> tuple[list[tuple[int, ...]], list[str]]:
        """Token ids of each prompt, and the text that its answers begin with."""
        if parsed.chat:
            prompts = [tuple(await self._tokenize_chat(parsed))]
            self._check(prompts, "messages")
            return prompts, [""]
        values, tokenizer = parse_prompts(parsed.fields), self.loaded.tokenizer
        if parsed.echo and (tokenizer is None or parsed.top_logprobs is not None):
            reason = (
                "this model has no tokenizer"
                if tokenizer is None
                else "log-probabilities of prompts are not available"
            )
            raise ApiError(
                f"echo is not supported: {reason}", param="echo", code="unsupported_parameter"
            )
        prompts = [
            tuple(await self._encode(value) if isinstance(value, str) else value)
            for value in values
        ]
        self._check(prompts, "prompt")
        if not parsed.echo or tokenizer is None:
            return prompts, [""] * len(prompts)
        return prompts, [
            value if isinstance(value, str) else tokenizer.decode(value) for value in values
        ]

    async def _tokenize_chat(self, parsed: ParsedRequest) -> list[int]:
        tokenizer = self.loaded.tokenizer
        messages = parse_messages(parsed.fields)
        if tokenizer is None:
            raise ApiError(
                "this model has no tokenizer; send token ids to /v1/completions", param="messages"
            )
        try:
            text = tokenizer.chat(messages)
        except WeightsError as error:
            # do not show clients the path of the weights
            path = str(getattr(tokenizer, "where", self.names[0]))
            message = str(error).replace(path, self.names[0])
            raise ApiError(message, param="messages", code="chat_template") from None
        return await self._encode(text, special=False)

    async def _compile_guide(self, parsed: ParsedRequest) -> None:
        """Compile a constraint in a thread, which may take long; the engine reuses it."""
        guides = self.engine.engine.guides
        try:
            if parsed.sampling.constrained and guides is not None:
                await asyncio.to_thread(guides.open, parsed.sampling)
        except ValueError as error:
            raise value_error(error) from None

    async def _encode(self, text: str, *, special: bool = True) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ApiError(
                "prompt is text, but this model has no tokenizer; give token ids", param="prompt"
            )
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text, special=special)
        return await asyncio.to_thread(tokenizer.encode, text, special=special)

    def _check(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        for prompt in prompts:
            try:
                check_prompt(prompt, context=self.context, vocab=self.engine.engine.runner.vocab)
            except ValueError as error:
                code = "context_length_exceeded" if len(prompt) >= self.context else None
                raise ApiError(str(error), param=param, code=code) from None

    def _sampling(self, parsed: ParsedRequest, prompt: Sequence[int]) -> SamplingParams:
        """The parameters for one prompt: its token limit and the model's stop token ids."""
        sampling = parsed.sampling
        if parsed.has_max_tokens and len(prompt) + sampling.max_new_tokens > self.context:
            raise ApiError(
                f"This model's maximum context length is {self.context} tokens; the prompt has "
                f"{len(prompt)} and {sampling.max_new_tokens} new ones are requested. Request at "
                f"most {self.context - len(prompt)}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if sampling.stop and self.loaded.tokenizer is None:
            raise ApiError("stop requires a tokenizer and this model has none", param="stop")
        limit = sampling.max_new_tokens
        if not parsed.has_max_tokens:
            limit = max(1, self._max_tokens - len(prompt))
        return replace(sampling, max_new_tokens=limit, stop_token_ids=self.loaded.stop_token_ids)
