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
from workers.inference.adapters.adapter import Adapter
from workers.inference.model_loading import LoadedModel
from workers.inference.request import check_prompt
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.server.async_engine import AsyncEngine
from workers.inference.server.http.admission import Admission
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.pooling import ScoreKind, parse_scores, texts_to_score
from workers.inference.server.http.request_parsing import (
    ParsedRequest,
    parse_body,
    parse_messages,
    parse_prompts,
    value_error,
)
from workers.inference.server.http.schemas import model_card
from workers.inference.server.http.tools import plain_messages
from workers.inference.server.observe.engine_state import merge_states
from workers.inference.server.replicas.forwarding import Upstream
from workers.inference.server.replicas.router import ReplicaRouter
from workers.inference.server.replicas.stats import ReplicaStatsCollector
from workers.inference.server.token_stream import TokenStream
from workers.inference.text.tokenizer import Tokenizer
from workers.models.errors import WeightsError
from workers.models.text.chat_format import ChatFormat, open_chat_format

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
        self._format: ChatFormat | None = None
        self.created = int(time.time())
        self.context = loaded.spec.max_seq_len
        pool = engine.engine.scheduler.pool
        self._max_tokens = min(self.context, pool.blocks * pool.block_size)

    @property
    def supports_chat(self) -> bool:
        """Whether the model answers messages: it has a chat template and predicts tokens."""
        has_template = getattr(self.loaded.tokenizer, "chat_template", None) is not None
        return has_template and not self.scores

    @property
    def scores(self) -> bool:
        """Whether the model is a reward model, which scores texts and writes none."""
        return self.loaded.spec.scalar_head

    @property
    def upstreams(self) -> list[Upstream]:
        """The other replicas, on the first one."""
        return [] if self.router is None else self.router.upstreams

    @property
    def forwarded(self) -> int:
        """Answers in progress in other processes."""
        return 0 if self.router is None else self.router.forwarded

    def models(self) -> list[dict[str, Any]]:
        """The data of /v1/models."""
        base, store = self.names[0], self.engine.engine.adapters
        own = model_card(base, created=self.created, context=self.context)
        adapters = () if store is None else tuple(store.by_name)
        return [
            own,
            *(
                model_card(name, created=self.created, context=self.context, parent=base)
                for name in adapters
            ),
        ]

    def model(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models for a name. Raises ApiError 404."""
        adapter = self.find_model(name)
        shown = self.names[0] if adapter is None else adapter.name
        return next(card for card in self.models() if card["id"] == shown)

    def find_model(self, name: Any) -> Adapter | None:
        """The adapter of that name, None for the base. Raises ApiError 404 for another name."""
        if name in self.names:
            return None
        store = self.engine.engine.adapters
        adapter = None if store is None or not isinstance(name, str) else store.by_name.get(name)
        if adapter is None:
            message = f"The model `{name}` does not exist; this server has {self.names[0]}"
            if store is not None and store.by_name:
                message += f" and {len(store.by_name)} adapters; GET /v1/models lists them"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return adapter

    async def parse(self, body: Any, *, chat: bool) -> ParsedRequest:
        """Check everything that does not need the engine. Raises ApiError."""
        parsed = parse_body(body, chat=chat)
        adapter = self.find_model(parsed.fields.get("model", self.names[0]))
        if self.scores:
            raise ApiError(
                f"{self.names[0]} is a reward model and cannot generate text; POST "
                "messages to /pooling",
                param="model",
                code="model_not_supported",
            )
        prompts, prefixes = await self._tokenize(parsed)
        await self._compile_guide(parsed)
        samplings = tuple(self._sampling(parsed, prompt) for prompt in prompts)
        return replace(
            parsed,
            adapter=adapter,
            prompts=tuple(prompts),
            prefixes=tuple(prefixes),
            samplings=samplings,
        )

    async def parse_scores(self, body: Any, kind: ScoreKind) -> ParsedRequest:
        """As `parse`, for scores of a reward model. Raises ApiError if the server has none."""
        parsed = parse_scores(body, kind)
        adapter = self.find_model(parsed.fields.get("model", self.names[0]))
        if not self.scores:
            raise ApiError(
                f"{self.names[0]} cannot score text; serve a model of objective reward",
                param="model",
                code="model_not_supported",
            )

        def encode() -> list[tuple[int, ...]]:
            return texts_to_score(parsed, encode=self._ids, chat_format=self._chat_format)

        prompts = await asyncio.to_thread(encode)
        self._check(prompts, "input" if "input" in parsed.fields else "messages", parsed)
        samplings = (parsed.sampling,) * len(prompts)
        return replace(
            parsed,
            adapter=adapter,
            prompts=tuple(prompts),
            prefixes=("",) * len(prompts),
            samplings=samplings,
        )

    async def submit(self, parsed: ParsedRequest, client: str = "") -> TokenStream:
        """A stream that the engine has accepted; the caller closes it. Raises ApiError."""
        name = self.names[0] if parsed.adapter is None else parsed.adapter.name
        stream = TokenStream(parsed, model=name, tokenizer=self.loaded.tokenizer, client=client)
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
            self._check(prompts, "messages", parsed)
            return prompts, [""]
        values, tokenizer = parse_prompts(parsed.fields), self.loaded.tokenizer
        if parsed.echo and tokenizer is None:
            raise ApiError(
                "echo is not supported: this model has no tokenizer; set prompt_logprobs instead",
                param="echo",
                code="unsupported_parameter",
            )
        prompts = [
            tuple(await self._encode(value) if isinstance(value, str) else value)
            for value in values
        ]
        self._check(prompts, "prompt", parsed)
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
        tools = () if parsed.tools is None else parsed.tools.tools
        try:
            messages = readable_messages(tokenizer, messages, tools)
            if sum(len(message["content"]) for message in messages) < _LONG_TEXT:
                return tokenizer.encode_chat(messages, tools=tools)
            return await asyncio.to_thread(tokenizer.encode_chat, messages, tools=tools)
        except WeightsError as error:
            # do not show clients the path of the weights
            path = str(getattr(tokenizer, "where", self.names[0]))
            message = str(error).replace(path, self.names[0])
            raise ApiError(message, param="messages", code="chat_template") from None

    async def _compile_guide(self, parsed: ParsedRequest) -> None:
        """Compile a constraint in a thread, which may take long; the engine reuses it."""
        guides = self.engine.engine.guides
        try:
            if parsed.sampling.constrained and guides is not None:
                await asyncio.to_thread(guides.open, parsed.sampling)
        except ValueError as error:
            raise value_error(error) from None

    async def _encode(self, text: str) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self._ids(text)
        return await asyncio.to_thread(self._ids, text)

    def _ids(self, text: str) -> list[int]:
        if self.loaded.tokenizer is None:
            raise ApiError(
                "prompt is text, but this model has no tokenizer; give token ids", param="prompt"
            )
        return self.loaded.tokenizer.encode(text)

    def _chat_format(self) -> ChatFormat:
        """How training encoded conversations and answers, read once."""
        if self._format is None:
            if self.loaded.path is None or self.loaded.tokenizer is None:
                raise ApiError(
                    "this model has no tokenizer; send token ids as input", param="input"
                )
            try:
                self._format = open_chat_format(self.loaded.path)
            except WeightsError as error:
                message = str(error).replace(str(self.loaded.path), self.names[0])
                raise ApiError(message, code="chat_template") from None
        return self._format

    def _check(self, prompts: Sequence[Sequence[int]], param: str, parsed: ParsedRequest) -> None:
        vocab, room = self.engine.engine.runner.vocab, min(1, parsed.sampling.max_new_tokens)
        for prompt in prompts:
            try:
                check_prompt(prompt, context=self.context, vocab=vocab, room=room)
            except ValueError as error:
                code = "context_length_exceeded" if len(prompt) > self.context - room else None
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
            raise ApiError(
                "stop requires a tokenizer, but this model does not have one", param="stop"
            )
        limit = sampling.max_new_tokens
        if not parsed.has_max_tokens:
            limit = max(1, self._max_tokens - len(prompt))
        return replace(sampling, max_new_tokens=limit, stop_token_ids=self.loaded.stop_token_ids)


def readable_messages(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Sequence[Any]
) -> list[dict[str, Any]]:
    """Messages that the template renders with all calls and tools; as plain texts if it ignores
    them.
    """
    has_calls = any(each.get("tool_calls") or each["role"] == "tool" for each in messages)
    if not tools and not has_calls:
        return messages
    probe = [{"role": "user", "content": "a"}]
    sample = tools or [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    if tokenizer.chat(probe, tools=sample) != tokenizer.chat(probe):
        return messages
    return plain_messages(messages, tools)
