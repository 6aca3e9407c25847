"""Responses in the schema of OpenAI's API: completions and chats, complete or as stream chunks.

See platform.openai.com/docs/api-reference. Does not depend on HTTP or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.inference.sampling.prompt_scores import PromptScore
from workers.inference.server.output import OutputChunk
from workers.inference.server.tool_calls import CallPiece, ToolCall

# a token's text, its log-probability, and the likeliest in its place
_Scored = tuple[str, float | None, list[tuple[str, float]]]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What all responses to one request have in common.

    `token_text` returns the text of a token, for log-probabilities. `echoed` is how many of the
    likeliest tokens the log-probabilities of an echoed prompt list, None without them.
    """

    id: str
    created: int
    model: str
    chat: bool
    with_logprobs: bool
    with_token_ids: bool
    token_text: Callable[[int], str]
    echoed: int | None = None
    with_prompt_logprobs: bool = False
    prompts: Sequence[Sequence[int]] = ()
    answers_per_prompt: int = 1

    def complete(self, answers: Sequence[OutputChunk], usage: dict[str, Any]) -> dict[str, Any]:
        """The response that is not streamed."""
        shape = self._message if self.chat else self._completion
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._top(name), "choices": [shape(answer) for answer in answers], "usage": usage}

    def chunk(self, output: OutputChunk) -> dict[str, Any]:
        """A stream chunk."""
        return self._stream([self._delta(output) if self.chat else self._completion(output)])

    def role_chunk(self, index: int) -> dict[str, Any]:
        """The first stream chunk of a chat answer."""
        delta = {"role": "assistant", "content": ""}
        return self._stream(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        )

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last stream chunk, for `stream_options.include_usage`."""
        return {**self._stream([]), "usage": usage}

    def _stream(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._top(name), "choices": choices}

    def _top(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _completion(self, output: OutputChunk) -> dict[str, Any]:
        return self._with_ids(
            output,
            {
                "index": output.index,
                "text": output.text,
                "logprobs": self._completion_logprobs(output),
                "finish_reason": output.finish,
            },
        )

    def _message(self, output: OutputChunk) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if output.calls:
            message["content"] = output.text or None
            message["tool_calls"] = [
                _tool_call(call, call.arguments) for call in output.calls if call is not None
            ]
        return self._with_ids(
            output,
            {
                "index": output.index,
                "message": message,
                "logprobs": self._chat_logprobs(output),
                "finish_reason": output.finish,
            },
        )

    def _delta(self, output: OutputChunk) -> dict[str, Any]:
        has_content = output.text or (self.with_token_ids and output.token_ids)
        delta: dict[str, Any] = {"content": output.text} if has_content else {}
        if output.pieces:
            delta["tool_calls"] = [_call_piece(piece) for piece in output.pieces]
        return self._with_ids(
            output,
            {
                "index": output.index,
                "delta": delta,
                "logprobs": self._chat_logprobs(output),
                "finish_reason": output.finish,
            },
        )

    def _with_ids(self, output: OutputChunk, choice: dict[str, Any]) -> dict[str, Any]:
        if self.with_prompt_logprobs and output.prompt is not None:
            choice = {**choice, "prompt_logprobs": self._prompt_logprobs(output.prompt)}
        if not self.with_token_ids:
            return choice
        return {**choice, "token_ids": list(output.token_ids)}

    def _completion_logprobs(self, output: OutputChunk) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        offsets, offset = [], output.offset
        scored = [*self._scored_prompt(output), *self._scored(output)]
        for text, _, _ in scored:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [text for text, _, _ in scored],
            "token_logprobs": [logprob for _, logprob, _ in scored],
            "top_logprobs": [
                None if logprob is None else dict((*top, (text, logprob)))
                for text, logprob, top in scored
            ],
            "text_offset": offsets,
        }

    def _scored_prompt(self, output: OutputChunk) -> list[_Scored]:
        """The tokens of an echoed prompt; nothing is known about its first one."""
        if self.echoed is None or output.prompt is None:
            return []
        first = self.prompts[output.index // self.answers_per_prompt][0]
        return [
            (self.token_text(first), None, []),
            *(
                (
                    self.token_text(score.token),
                    score.logprob,
                    [(self.token_text(other), each) for other, each in score.top[: self.echoed]],
                )
                for score in output.prompt
            ),
        ]

    def _prompt_logprobs(self, scores: Sequence[PromptScore]) -> list[dict[str, Any] | None]:
        """As in vLLM: per token, by id, its own score and those of the likeliest."""

        def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"logprob": logprob, "rank": rank, "decoded_token": self.token_text(token)}

        listed: list[dict[str, Any] | None] = [None]
        for score in scores:
            likely = {
                str(token): entry(token, logprob, place)
                for place, (token, logprob) in enumerate(score.top, 1)
            }
            listed.append(
                {**likely, str(score.token): entry(score.token, score.logprob, score.rank)}
            )
        return listed

    def _chat_logprobs(self, output: OutputChunk) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            {
                **_token_logprob(text, logprob),
                "top_logprobs": [_token_logprob(*other) for other in top],
            }
            for text, logprob, top in self._scored(output)
            if logprob is not None
        ]
        return {"content": content, "refusal": None}

    def _scored(self, output: OutputChunk) -> list[_Scored]:
        """Per token its text, its log-probability, and the likeliest in its place."""
        tops = output.top_logprobs or ((),) * len(output.token_ids)
        return [
            (
                self.token_text(token),
                logprob,
                [(self.token_text(other), score) for other, score in top],
            )
            for token, logprob, top in zip(output.token_ids, output.logprobs, tops, strict=True)
        ]


def usage(*, prompt: int, output: int, cached: int) -> dict[str, Any]:
    """Token counts; `cached` tokens of the prompt were found in the cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def model_card(
    name: str, *, created: int, context: int, parent: str | None = None
) -> dict[str, Any]:
    """An entry of /v1/models; `parent` is the base of an adapter."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "orrery",
        "max_model_len": context,
        "parent": parent,
    }


def server_sent_event(data: dict[str, Any]) -> bytes:
    """One event of a stream: `data: {...}` and an empty line."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _tool_call(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    if piece.call is not None:
        return {"index": piece.index, **_tool_call(piece.call, piece.arguments)}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def _token_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
