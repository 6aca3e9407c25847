"""One request on its way: its prompts' tickets, and their pieces put together to an answer, whole
or as chunks.

Knows text and shapes; knows no HTTP. `close` gives back what it holds, whatever has become of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

from workers.inference.server.flow import Flow
from workers.inference.server.parameters import Asked
from workers.inference.server.shapes import Choice, Head, Scored, usage
from workers.inference.server.ticket import Piece, Ticket
from workers.inference.tokenizer import Words


class Order:
    """`texts` are what answers begin with: the prompts where they are echoed."""

    def __init__(
        self,
        asked: Asked,
        head: Head,
        tickets: Sequence[Ticket],
        inbox: asyncio.Queue[tuple[Ticket, Piece | BaseException]],
        *,
        words: Words | None,
        texts: Sequence[str],
    ) -> None:
        self.asked, self.head, self.tickets = asked, head, tickets
        self.held = ExitStack()
        self._inbox, self._words, self._texts = inbox, words, texts
        decode: Callable[[Sequence[int]], str] | None = None if words is None else words.decode
        self._flows = {
            (each.place, answer): Flow(decode, each.sampling)
            for each in tickets
            for answer in range(asked.sampling.n)
        }

    def close(self) -> None:
        self.held.close()

    async def whole(self) -> dict[str, Any]:
        scored: dict[tuple[int, int], list[Scored]] = {key: [] for key in self._flows}
        finish: dict[tuple[int, int], str | None] = {}
        async for ticket, piece in self._pieces():
            key = ticket.place, piece.answer
            self._flows[key].ids += piece.tokens
            scored[key] += self._scored(piece)
            finish[key] = piece.finish
        choices = [
            Choice(
                self._place(*key),
                self._texts[key[0]] + flow.text(),
                finish[key],
                None if self.asked.top is None else scored[key],
                ids=flow.ids if self._ids else None,
            )
            for key, flow in self._flows.items()
        ]
        return self.head.whole(choices, self._usage())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        begun: dict[tuple[int, int], int] = {}  # characters shown
        async for ticket, piece in self._pieces():
            key = ticket.place, piece.answer
            flow, first = self._flows[key], key not in begun
            text = flow.add(piece.tokens) + (flow.end() if piece.finish else "")
            if first:
                text = self._texts[ticket.place] + text
                if self.head.chat:
                    yield self.head.chunk([Choice(self._place(*key), "")], first=True)
            if text or piece.finish or self.asked.top is not None or self._ids:
                scored = None if self.asked.top is None else self._scored(piece)
                ids = piece.tokens if self._ids else None
                yield self.head.chunk(
                    [Choice(self._place(*key), text, piece.finish, scored, begun.get(key, 0), ids)]
                )
            begun[key] = begun.get(key, 0) + len(text)
        if self.asked.usage:
            yield self.head.last(self._usage())

    async def _pieces(self) -> AsyncIterator[tuple[Ticket, Piece]]:
        """Those of an answer that have come by now as one: where the engine is faster, a client
        gets fewer chunks.
        """
        left = len(self._flows)
        while left:
            come: dict[tuple[Ticket, int], Piece] = {}
            while not come or not self._inbox.empty():
                ticket, found = await self._inbox.get()
                if isinstance(found, BaseException):
                    raise found
                key = ticket, found.answer
                come[key] = come[key].then(found) if key in come else found
            for (ticket, _), piece in come.items():
                left -= piece.finish is not None
                yield ticket, piece

    def _scored(self, piece: Piece) -> list[Scored]:
        if self.asked.top is None:
            return []
        tops = piece.top or ((),) * len(piece.tokens)
        return [
            Scored(
                self._text(token),
                logprob,
                tuple((self._text(other), score) for other, score in top),
            )
            for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
        ]

    def _text(self, token: int) -> str:
        return (
            f"token_id:{token}"
            if self._words is None
            else self._words.decode([token], special=True)
        )

    def _place(self, prompt: int, answer: int) -> int:
        return prompt * self.asked.sampling.n + answer

    def _usage(self) -> dict[str, Any]:
        return usage(
            prompt=sum(len(each.prompt) for each in self.tickets),
            answer=sum(len(each.ids) for each in self._flows.values()),
            cached=sum(each.shared_tokens for each in self.tickets),
        )

    @property
    def _ids(self) -> bool:
        return self.asked.ids or self._words is None
