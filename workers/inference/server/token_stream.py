"""One client request in progress: output chunks from the engine in, response bodies out.

All methods belong to the event loop's thread. `close` frees what the request holds, whatever
happened to it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from workers.inference.server.detokenizer import Detokenizer
from workers.inference.server.http.pooling import scores_response
from workers.inference.server.http.request_parsing import ParsedRequest
from workers.inference.server.http.schemas import ResponseFormat, usage
from workers.inference.server.output import OutputChunk
from workers.inference.server.tool_calls import ToolCallReader
from workers.inference.text.tokenizer import Tokenizer


class TokenStream:
    """The answers to all prompts of a request; `unfinished` counts answers to come.

    `accepted` resolves before the first chunk, or raises the engine's error. Register what has to
    be undone at the end in `resources`.
    """

    def __init__(
        self,
        request: ParsedRequest,
        *,
        model: str,
        tokenizer: Tokenizer | None,
        client: str = "",
    ) -> None:
        self.request, self.client = request, client
        kind = request.scores or ("chatcmpl" if request.chat else "cmpl")
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.resources = ExitStack()
        self.unfinished = request.answers
        self.cached_tokens = 0  # of all prompts; set by the engine's thread
        self._queue: asyncio.Queue[OutputChunk | BaseException] = asyncio.Queue()
        decode = None if tokenizer is None else tokenizer.decode
        self._detokenizers = [
            Detokenizer(decode, params)
            for params in request.samplings
            for _ in range(request.sampling.n)
        ]

        def token_text(token: int) -> str:
            if tokenizer is None:
                return f"token_id:{token}"
            return tokenizer.decode([token], special=True)

        self._format = ResponseFormat(
            id=self.id,
            created=int(time.time()),
            model=model,
            chat=request.chat,
            with_logprobs=request.top_logprobs is not None,
            echoed=request.top_logprobs if request.echo else None,
            with_prompt_logprobs="prompt_logprobs" in request.fields,
            prompts=request.prompts,
            answers_per_prompt=request.sampling.n,
            with_token_ids=request.return_token_ids or tokenizer is None,
            token_text=token_text,
        )

    def prompt_id(self, place: int) -> str:
        """The id of one of its prompts in reports."""
        return f"{self.id}/{place}" if place else self.id

    def accept(self) -> None:
        """The engine has queued all prompts."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, chunk: OutputChunk) -> None:
        """Deliver new output."""
        self.unfinished -= chunk.finish is not None
        self._queue.put_nowait(chunk)

    def fail(self, error: BaseException) -> None:
        """Deliver an error; no more chunks will come."""
        self.unfinished = 0
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved: the client may have disconnected
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Release its resources."""
        self.resources.close()

    async def response(self) -> dict[str, Any]:
        """The complete response. Raises the engine's error."""
        answers = [OutputChunk(index) for index in range(len(self._detokenizers))]
        async for chunk in self._chunks():
            self._detokenizers[chunk.index].ids += chunk.token_ids
            answers[chunk.index] = answers[chunk.index].joined(chunk)
        if self.request.scores is not None:
            about = self._format
            return scores_response(
                self.request,
                answers,
                self._usage(),
                id=self.id,
                created=about.created,
                model=about.model,
            )
        complete = [
            replace(answer, text=self._prefix(index) + self._detokenizers[index].text())
            for index, answer in enumerate(answers)
        ]
        return self._format.complete(list(map(self._with_calls, complete)), self._usage())

    def _with_calls(self, answer: OutputChunk) -> OutputChunk:
        """A complete answer with its calls of tools apart from its text."""
        if self.request.tools is None:
            return answer
        reader = ToolCallReader(self.request.tools)
        reader.add(answer.text, end=True)
        finish = reader.finish if answer.finish == "stop" else answer.finish
        return replace(answer, text=reader.content, calls=tuple(reader.calls), finish=finish)

    async def response_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The response as stream chunks. Raises the engine's error."""
        shown: dict[int, int] = {}  # characters
        readers: dict[int, ToolCallReader] = {}
        always = self._format.with_logprobs or self._format.with_token_ids
        async for chunk in self._chunks():
            index, detokenizer = chunk.index, self._detokenizers[chunk.index]
            text = detokenizer.add(chunk.token_ids) + (detokenizer.end() if chunk.finish else "")
            if index not in shown:
                text = self._prefix(index) + text
                if self._format.chat:
                    yield self._format.role_chunk(index)
            if self.request.tools is not None:
                reader = readers.setdefault(index, ToolCallReader(self.request.tools))
                text, pieces = reader.add(text, end=chunk.finish is not None)
                finish = reader.finish if chunk.finish == "stop" else chunk.finish
                chunk = replace(chunk, pieces=tuple(pieces), finish=finish)
            if text or chunk.pieces or chunk.finish or always:
                offset = shown.get(index, 0)
                yield self._format.chunk(replace(chunk, text=text, offset=offset))
            shown[index] = shown.get(index, 0) + len(text)
        if self.request.include_usage:
            yield self._format.usage_chunk(self._usage())

    async def _chunks(self) -> AsyncIterator[OutputChunk]:
        """Output until all answers are finished.

        Joins what has arrived per answer: clients get fewer chunks if the engine is faster.
        """
        left = len(self._detokenizers)
        while left:
            arrived: dict[int, OutputChunk] = {}
            while not arrived or not self._queue.empty():
                item = await self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                earlier = arrived.get(item.index)
                arrived[item.index] = item if earlier is None else earlier.joined(item)
            for chunk in arrived.values():
                left -= chunk.finish is not None
                yield chunk

    def _prefix(self, index: int) -> str:
        """The text that an answer begins with: its prompt if it is echoed."""
        return self.request.prefixes[index // self.request.sampling.n]

    def _usage(self) -> dict[str, Any]:
        return usage(
            prompt=sum(map(len, self.request.prompts)),
            output=sum(len(detokenizer.ids) for detokenizer in self._detokenizers),
            cached=self.cached_tokens,
        )
