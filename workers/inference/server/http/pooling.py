"""Scores of a reward model: parses `/pooling` and `/score` as vLLM has them, and their responses.

`/pooling` takes `input` (text, token ids, or a list of either) or `messages`; `/score` takes
`text_1` and `text_2`, prompts and their answers. A score is the scalar head's number, without a
sigmoid. Does not depend on HTTP. Raises ApiError that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from workers.inference.sampling.parameters import SamplingParams
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.request_parsing import (
    MAX_PROMPTS,
    ParsedRequest,
    check_object,
    integer_field,
    parse_messages,
    parse_prompts,
)
from workers.inference.server.output import OutputChunk
from workers.models.errors import WeightsError
from workers.models.text.chat_format import ChatFormat

ScoreKind = Literal["pooling", "score"]
_SHARED = {"model", "user", "priority", "use_activation", "encoding_format"}
_FIELDS: dict[ScoreKind, set[str]] = {
    "pooling": _SHARED | {"input", "messages", "tools"},
    "score": _SHARED | {"text_1", "text_2"},
}
# accepted if they ask for what this server does anyway
_ONLY = {"use_activation": False, "encoding_format": "float"}


def parse_scores(body: Any, kind: ScoreKind) -> ParsedRequest:
    """All fields of a request except the texts. Raises ApiError."""
    fields = check_object(body, _FIELDS[kind])
    for name, only in _ONLY.items():
        if fields.get(name, only) != only:
            raise ApiError(
                f"{name} is {fields[name]!r}; this server returns the score itself, try {only!r}",
                param=name,
            )
    return ParsedRequest(
        chat=False,
        fields=fields,
        sampling=SamplingParams(max_new_tokens=0, pooled=True),
        has_max_tokens=True,
        stream=False,
        include_usage=False,
        top_logprobs=None,
        echo=False,
        return_token_ids=False,
        priority=integer_field(fields, "priority", 0, low=-100, high=100),
        scores=kind,
    )


def texts_to_score(
    parsed: ParsedRequest,
    *,
    encode: Callable[[str], list[int]],
    chat_format: Callable[[], ChatFormat],
) -> list[tuple[int, ...]]:
    """Token ids of each text, as training encoded it: a conversation or an answer ends with its
    stop token. Raises ApiError.
    """
    fields = parsed.fields
    if parsed.scores == "score":
        return [_completion(*pair, chat_format()) for pair in _pairs(fields)]
    if ("messages" in fields) == ("input" in fields):
        raise ApiError("give either messages or input", param="input")
    if "messages" in fields:
        return [_conversation(fields, chat_format())]
    values = parse_prompts({"prompt": fields["input"]}, name="input")
    return [tuple(encode(each) if isinstance(each, str) else each) for each in values]


def scores_response(
    parsed: ParsedRequest,
    answers: Sequence[OutputChunk],
    usage: dict[str, Any],
    *,
    id: str,
    created: int,
    model: str,
) -> dict[str, Any]:
    """The response in vLLM's shape."""
    data: list[dict[str, Any]] = [
        {"index": answer.index, "object": "score", "score": answer.score}
        if parsed.scores == "score"
        else {"index": answer.index, "object": "pooling", "data": [answer.score]}
        for answer in answers
    ]
    top = {"id": id, "object": "list", "created": created, "model": model}
    return {**top, "data": data, "usage": usage}


def _pairs(fields: Any) -> list[tuple[str, str]]:
    """Prompts with their answers: one prompt may have several."""
    first, second = (_texts(fields, name) for name in ("text_1", "text_2"))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise ApiError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; send one prompt, or as many "
            "as answers",
            param="text_1",
        )
    return list(zip(first, second, strict=True))


def _texts(fields: Any, name: str) -> list[str]:
    value = fields.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise ApiError(f"{name} must be a text or a list of texts", param=name)
    if len(texts) > MAX_PROMPTS:
        raise ApiError(
            f"{name} has {len(texts):,} texts; send at most {MAX_PROMPTS:,} per request", param=name
        )
    return texts


def _completion(prompt: str, answer: str, chat: ChatFormat) -> tuple[int, ...]:
    try:
        return tuple(chat.completion(prompt, answer, train_on="completion").ids)
    except WeightsError as error:
        raise ApiError(str(error), param="text_2") from None


def _conversation(fields: Any, chat: ChatFormat) -> tuple[int, ...]:
    messages, tools = parse_messages(fields), fields.get("tools", [])
    if messages[-1]["role"] != "assistant":
        raise ApiError(
            f"the last message is of {messages[-1]['role']}; a reward model scores the assistant's "
            "answer, which must be the last message",
            param="messages",
        )
    if not isinstance(tools, list):
        raise ApiError("tools must be a list", param="tools")
    try:
        answer = len(messages) - 1
        text = chat.conversation(messages, answer=answer, train_on="completion", tools=tools)
    except WeightsError as error:
        # do not show clients the path of the weights
        message = str(error).replace(chat.where, "the model")
        raise ApiError(message, param="messages", code="chat_template") from None
    return tuple(text.trimmed().ids)
