"""Answers as OpenAI's API writes them: completions and chats, whole or as chunks, with usage and
log-probabilities.

Shapes only (platform.openai.com/docs/api-reference); knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scored:
    """One token of an answer: its text, its log-probability, and the likeliest in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, or what is new of it. `place` counts over prompts and their answers."""

    place: int
    text: str
    finish: str | None = None
    scored: Sequence[Scored] | None = None
    offset: int = 0  # of the text, for completions' log-probabilities
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer share."""

    id: str
    created: int
    model: str
    chat: bool

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        shape = _message if self.chat else _completion
        name = "chat.completion" if self.chat else "text_completion"
        return {**self._top(name), "choices": [shape(each) for each in choices], "usage": usage}

    def chunk(self, choices: Sequence[Choice], *, first: bool = False) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        shape: Callable[[Choice], dict[str, Any]]
        shape = (lambda each: _delta(each, first=first)) if self.chat else _completion
        return {**self._top(name), "choices": [shape(each) for each in choices]}

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk of `stream_options.include_usage`."""
        return {**self.chunk(()), "usage": usage}

    def _top(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def usage(*, prompt: int, answer: int, cached: int) -> dict[str, Any]:
    """Tokens; `cached` ones of the prompt were found in the cache."""
    told = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return {**told, "prompt_tokens_details": {"cached_tokens": cached}}


def model_card(name: str, *, created: int, context: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "orrery",
        "max_model_len": context,
    }


def _completion(choice: Choice) -> dict[str, Any]:
    scores = None
    if choice.scored is not None:
        offsets, at = [], choice.offset
        for each in choice.scored:
            offsets.append(at)
            at += len(each.token)
        scores = {
            "tokens": [each.token for each in choice.scored],
            "token_logprobs": [each.logprob for each in choice.scored],
            "top_logprobs": [
                dict((*each.top, (each.token, each.logprob))) for each in choice.scored
            ],
            "text_offset": offsets,
        }
    told = {
        "index": choice.place,
        "text": choice.text,
        "logprobs": scores,
        "finish_reason": choice.finish,
    }
    return told if choice.ids is None else {**told, "token_ids": list(choice.ids)}


def _message(choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    told = {
        "index": choice.place,
        "message": message,
        "logprobs": _scores(choice),
        "finish_reason": choice.finish,
    }
    return told if choice.ids is None else {**told, "token_ids": list(choice.ids)}


def _delta(choice: Choice, *, first: bool) -> dict[str, Any]:
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
    if choice.text or (choice.ids and not first):
        delta["content"] = choice.text
    told = {
        "index": choice.place,
        "delta": delta,
        "logprobs": _scores(choice),
        "finish_reason": choice.finish,
    }
    return told if choice.ids is None else {**told, "token_ids": list(choice.ids)}


def _scores(choice: Choice) -> dict[str, Any] | None:
    if choice.scored is None:
        return None
    content = [
        {
            **_scored(each.token, each.logprob),
            "top_logprobs": [_scored(*other) for other in each.top],
        }
        for each in choice.scored
    ]
    return {"content": content, "refusal": None}


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def event(data: dict[str, Any]) -> bytes:
    """One of a stream: `data: {...}` and an empty line (server-sent events)."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
