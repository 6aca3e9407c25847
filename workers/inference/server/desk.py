"""From a request's JSON to an order that the engine works on: prompts to ids, limits, the model's
name.

Knows the model's words, the gate and the pump; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.inference.engine import check_prompt
from workers.inference.load import Loaded
from workers.inference.sampling import Sampling
from workers.inference.server.errors import ApiError
from workers.inference.server.fleet import Fleet
from workers.inference.server.gate import Gate
from workers.inference.server.order import Order
from workers.inference.server.others import Others
from workers.inference.server.parameters import (
    Asked,
    messages_of,
    of_engine,
    prompts_of,
    read_asked,
)
from workers.inference.server.pump import Pump
from workers.inference.server.shapes import Head, model_card
from workers.inference.server.ticket import Piece, Ticket
from workers.models.errors import WeightsError

_LONG = 4_000  # characters: what is longer is encoded in a thread, so that other streams go on


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that is right as far as one can tell without the engine; `texts` are what answers
    begin with.
    """

    asked: Asked
    prompts: list[tuple[int, ...]]
    texts: list[str]
    samplings: list[Sampling]

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.asked.sampling.n


class Desk:
    """Of one engine.

    `names` are all that a client may call the model by, the first one being what it is told.
    """

    def __init__(self, loaded: Loaded, pump: Pump, gate: Gate, *, names: Sequence[str]) -> None:
        self.loaded, self.pump, self.gate, self.names = loaded, pump, gate, tuple(names)
        self.fleet: Fleet | None = None  # the replicas that the first of them gives requests to
        self.others: Others | None = None  # what they tell it when they end
        self.created = int(time.time())
        self.context = loaded.spec.max_seq_len
        pool = pump.engine.scheduler.pool
        self._room = min(self.context, pool.blocks * pool.block_size)

    @property
    def chats(self) -> bool:
        return getattr(self.loaded.words, "chat_template", None) is not None

    def models(self) -> list[dict[str, Any]]:
        return [model_card(self.names[0], created=self.created, context=self.context)]

    async def read(self, body: Any, *, chat: bool) -> Wish:
        """All that can be checked before the engine is asked. Raises ApiError."""
        asked = read_asked(body, chat=chat)
        self.check_model(asked.given.get("model", self.names[0]))
        prompts, texts = await self._prompts(asked)
        await self._form(asked)
        return Wish(asked, prompts, texts, [self._sampling(asked, prompt) for prompt in prompts])

    async def order(self, wish: Wish, client: str = "") -> Order:
        """Accepted by the engine; whoever has it closes it. Raises ApiError."""
        asked = wish.asked
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        inbox: asyncio.Queue[tuple[Ticket, Piece | BaseException]] = asyncio.Queue()
        tickets = [
            Ticket(
                f"{name}/{place}" if place else name,
                place,
                prompt,
                sampling,
                inbox,
                asked.priority,
                client,
            )
            for place, (prompt, sampling) in enumerate(
                zip(wish.prompts, wish.samplings, strict=True)
            )
        ]
        head = Head(name, int(time.time()), self.names[0], asked.chat)
        order = Order(asked, head, tickets, inbox, words=self.loaded.words, texts=wish.texts)
        try:
            order.held.enter_context(self.gate.room(len(tickets) * asked.sampling.n))
            for ticket in tickets:
                order.held.callback(self.pump.cancel, ticket)
            await asyncio.gather(*(self.pump.submit(ticket) for ticket in tickets))
        except ValueError as error:
            order.close()
            raise of_engine(error) from None
        except BaseException:
            order.close()
            raise
        return order

    def check_model(self, given: Any) -> None:
        if given not in self.names:
            message = f"The model `{given}` does not exist; this server has {self.names[0]}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    async def _prompts(self, asked: Asked) -> tuple[list[tuple[int, ...]], list[str]]:
        """Ids, and the texts that answers begin with."""
        if asked.chat:
            prompts = [tuple(await self._chat(asked))]
            self._check(prompts, "messages")
            return prompts, [""]
        given, words = prompts_of(asked.given), self.loaded.words
        if asked.echo and (words is None or asked.top is not None):
            why = (
                "this model has no tokenizer"
                if words is None
                else "prompts get no log-probabilities here"
            )
            raise ApiError(
                f"echo cannot be done: {why}", param="echo", code="unsupported_parameter"
            )
        prompts = [
            tuple(await self._encoded(each) if isinstance(each, str) else each) for each in given
        ]
        self._check(prompts, "prompt")
        if not asked.echo or words is None:
            return prompts, [""] * len(prompts)
        return prompts, [each if isinstance(each, str) else words.decode(each) for each in given]

    async def _chat(self, asked: Asked) -> list[int]:
        words = self.loaded.words
        messages = messages_of(asked.given)
        if words is None:
            raise ApiError(
                "this model came without a tokenizer; send token ids to /v1/completions",
                param="messages",
            )
        try:
            text = words.chat(messages)
        except WeightsError as error:
            where = str(getattr(words, "where", self.names[0]))  # which is no client's business
            message = str(error).replace(where, self.names[0])
            raise ApiError(message, param="messages", code="chat_template") from None
        return await self._encoded(text, special=False)

    async def _form(self, asked: Asked) -> None:
        """Made in a thread, where it may take its time; the engine finds it made."""
        guides = self.pump.engine.guides
        try:
            if asked.sampling.constrained and guides is not None:
                await asyncio.to_thread(guides.open, asked.sampling)
        except ValueError as error:
            raise of_engine(error) from None

    async def _encoded(self, text: str, *, special: bool = True) -> list[int]:
        words = self.loaded.words
        if words is None:
            message = "prompt is text, and this model came without a tokenizer; give token ids"
            raise ApiError(message, param="prompt")
        if len(text) < _LONG:
            return words.encode(text, special=special)
        return await asyncio.to_thread(words.encode, text, special=special)

    def _check(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        for prompt in prompts:
            try:
                check_prompt(prompt, context=self.context, vocab=self.pump.engine.runner.vocab)
            except ValueError as error:
                code = "context_length_exceeded" if len(prompt) >= self.context else None
                raise ApiError(str(error), param=param, code=code) from None

    def _sampling(self, asked: Asked, prompt: Sequence[int]) -> Sampling:
        sampling, left = asked.sampling, self._room - len(prompt)
        if asked.limited and len(prompt) + sampling.max_new_tokens > self.context:
            message = (
                f"This model's maximum context length is {self.context} tokens; {len(prompt)} "
                "of the prompt and "
            )
            message += (
                f"{sampling.max_new_tokens} new ones are more. Ask for at most "
                f"{self.context - len(prompt)}"
            )
            raise ApiError(message, param="max_tokens", code="context_length_exceeded")
        if sampling.stop and self.loaded.words is None:
            raise ApiError(
                "stop is text, and this model came without a tokenizer; leave it out", param="stop"
            )
        most = sampling.max_new_tokens if asked.limited else max(1, left)
        return replace(sampling, max_new_tokens=most, ends=self.loaded.ends)
