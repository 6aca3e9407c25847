"""Parses requests: validates the fields of OpenAI's API, refuses those that are not supported.

Does not depend on HTTP. Raises ApiError that names the field.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workers.inference.adapters.adapter import Adapter
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.tools import ToolUse, parse_tools, template_messages

# accepted and without effect
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
# not OpenAI's; named as in other open servers
_EXTENSIONS = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "return_token_ids",
    "prompt_logprobs",
    "regex",
    "grammar",
    "priority",
}
_SHARED = {
    "model",
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "logit_bias",
    "response_format",
}
_FIELDS = {
    "completions": _SHARED | {"prompt", "echo", "best_of", "suffix"},
    "chat": _SHARED
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "modalities",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    },
}
_NEUTRAL: dict[str, Callable[[Any], bool]] = {  # unsupported fields, and values without effect
    "suffix": lambda value: value == "",
    "modalities": lambda value: value == ["text"],
}
# each new token is compared with all stop strings
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_TOP_LOGPROBS = 16, 1_000, 20
MAX_PROMPTS = 2_048


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that is valid as far as that can be checked without the engine.

    `sampling` has no stop token ids, and no `max_new_tokens` unless `has_max_tokens`.
    `top_logprobs` is None without log-probabilities; `adapter` is the one that the model's name
    selects; `scores` a request for scores in place of answers. The last three fields have one
    entry per prompt and are set once prompts are tokenized; `prefixes` are the texts that answers
    begin with.
    """

    chat: bool
    fields: Mapping[str, Any]  # as sent, without nulls
    sampling: SamplingParams
    has_max_tokens: bool
    stream: bool
    include_usage: bool
    top_logprobs: int | None
    echo: bool
    return_token_ids: bool
    priority: int
    tools: ToolUse | None = None
    adapter: Adapter | None = None
    scores: Literal["pooling", "score"] | None = None
    prompts: tuple[tuple[int, ...], ...] = ()
    prefixes: tuple[str, ...] = ()
    samplings: tuple[SamplingParams, ...] = ()

    @property
    def answers(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.sampling.n


def parse_body(body: Any, *, chat: bool) -> ParsedRequest:
    """All fields of a request except prompt and messages. Raises ApiError."""
    known = _FIELDS["chat" if chat else "completions"] | _EXTENSIONS | _IGNORED
    fields = check_object(body, known)
    n = _number(fields, "n", 1, integer=True, low=1, high=128)
    if fields.get("best_of", n) != n:
        raise ApiError(
            f"best_of is {fields['best_of']!r}; this server supports only best_of equal to n, {n}",
            param="best_of",
        )
    max_tokens, top = _max_tokens(fields, chat=chat), _top_logprobs(fields, chat=chat)
    echo = _flag(fields, "echo")
    of_prompt = _prompt_logprobs(fields, top if echo else None, max_tokens, echo=echo)
    stream, options = _flag(fields, "stream"), fields.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise ApiError(
            "stream_options must be an object and requires stream: true", param="stream_options"
        )
    tools = parse_tools(fields, parallel=_flag(fields, "parallel_tool_calls", default=True))
    constraint = _constraint(fields, tools)
    seed = _number(fields, "seed", None, integer=True, low=-(2**63), high=2**63 - 1)
    try:
        sampling = SamplingParams(
            max_new_tokens=1 if max_tokens is None else max_tokens,
            temperature=_number(fields, "temperature", 1.0, low=0, high=2),
            top_p=_number(fields, "top_p", 1.0, low=0, high=1),
            # other servers use -1 for no limit
            top_k=max(0, _number(fields, "top_k", 0, integer=True, low=-1, high=2**31 - 1)),
            min_p=_number(fields, "min_p", 0.0, low=0, high=1),
            repetition_penalty=_number(fields, "repetition_penalty", 1.0, low=0.01, high=100),
            presence_penalty=_number(fields, "presence_penalty", 0.0, low=-2, high=2),
            frequency_penalty=_number(fields, "frequency_penalty", 0.0, low=-2, high=2),
            seed=secrets.randbits(63) if seed is None else seed % 2**63,
            n=n,
            stop=_stop_strings(fields.get("stop", [])),
            ignore_eos=_flag(fields, "ignore_eos"),
            logprobs=top is not None,
            top_logprobs=top or 0,
            prompt_logprobs=of_prompt,
            logit_bias=fields.get("logit_bias", {}),
            **constraint,
        )
    except ValueError as error:
        raise value_error(error) from None
    return ParsedRequest(
        chat=chat,
        fields=fields,
        sampling=sampling,
        has_max_tokens=max_tokens is not None,
        stream=stream,
        include_usage=_flag(options, "include_usage", "stream_options.include_usage"),
        top_logprobs=top,
        echo=echo,
        return_token_ids=_flag(fields, "return_token_ids"),
        tools=tools,
        priority=integer_field(fields, "priority", 0, low=-100, high=100),
    )


def check_object(body: Any, known: set[str]) -> dict[str, Any]:
    """The fields of a body that are not null. Raises ApiError for others than the `known` ones."""
    if not isinstance(body, dict):
        raise ApiError('the body is not a JSON object; send {"model": ..., ...}')
    fields = {name: value for name, value in body.items() if value is not None}
    _check_names(fields, known)
    return fields


def integer_field(
    fields: Mapping[str, Any], name: str, default: int, *, low: int, high: int
) -> int:
    """An integer in these limits."""
    return int(_number(fields, name, default, low=low, high=high, integer=True))


def value_error(error: ValueError) -> ApiError:
    """The response to an error of SamplingParams or the engine.

    Their messages begin with the name of the wrong parameter, if there is one.
    """
    first = str(error).split(" ", 1)[0]
    name = "response_format" if first == "json_schema" else first
    known = _FIELDS["chat"] | _FIELDS["completions"] | _EXTENSIONS
    return ApiError(str(error), param=name if name in known else None)


def parse_messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`{role, content, ...}`, with the text parts of each content joined. Raises ApiError."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one {role, content}", param="messages")
    parsed = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(f"{where} must be an object with a role and a content", param=where)
        parsed.append({**message, "content": _content(message.get("content"), where)})
    return template_messages(parsed)


def parse_prompts(fields: Mapping[str, Any], *, name: str = "prompt") -> list[str | list[int]]:
    """Each prompt as a string or token ids; errors call the field `name`."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]  # type: ignore[list-item]
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(entry, str) or _is_ids(entry) for entry in prompt)
    ):
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(
                f"{name} has {len(prompt):,} entries; send at most {MAX_PROMPTS:,} per request",
                param=name,
            )
        return prompt
    raise ApiError(f"{name} must be a string, a list of token ids, or a list of either", param=name)


def _check_names(fields: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(fields.keys() - known):
        raise ApiError(
            f"Unrecognized request argument supplied: {unknown[0]}; this server accepts "
            f"{', '.join(sorted(known))}",
            param=unknown[0],
        )
    for name, is_neutral in _NEUTRAL.items():
        if name in fields and not is_neutral(fields[name]):
            raise ApiError(
                f"{name} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )


def _constraint(fields: Mapping[str, Any], tools: ToolUse | None) -> dict[str, Any]:
    """What answers must match: the format, or calls of tools."""
    own = {
        "json_schema": _json_schema(fields.get("response_format", {"type": "text"})),
        "regex": fields.get("regex"),
        "grammar": fields.get("grammar"),
    }
    if tools is None:
        return own
    if any(value is not None for value in own.values()):
        raise ApiError(
            "tools and response_format, regex or grammar both constrain the answer; leave one out, "
            "or set tool_choice none",
            param="tools",
        )
    return tools.constraint


def _json_schema(response_format: Any) -> Any:
    """The schema that an answer must match; None for any text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":  # with a schema as in Together, llama.cpp and litellm
        schema = response_format.get("schema")
        return {"type": "object"} if schema is None else schema
    value = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(value, dict) or value.get("schema") is None:
        raise ApiError(
            f"response_format is {str(response_format)[:80]}; it must be text, json_object with an "
            "optional schema, or json_schema with {name, schema}",
            param="response_format",
        )
    return value["schema"]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        for part in value:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(
                    f"{where}.content: this model accepts only parts of type text",
                    param=f"{where}.content",
                )
        return "".join(part["text"] for part in value)
    raise ApiError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")


def _max_tokens(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    is_new_name = chat and "max_completion_tokens" in fields
    name = "max_completion_tokens" if is_new_name else "max_tokens"
    default = None if chat else 16  # OpenAI's
    low = 1 if chat else 0
    value: int | None = _number(fields, name, default, integer=True, low=low, high=2**31 - 1)
    return value


def _prompt_logprobs(
    fields: Mapping[str, Any], echoed: int | None, max_tokens: int | None, *, echo: bool
) -> int | None:
    """How many of the likeliest tokens to return per prompt token; None without scores."""
    limits: dict[str, Any] = {"integer": True, "low": 0, "high": MAX_TOP_LOGPROBS}
    own: int | None = _number(fields, "prompt_logprobs", None, **limits)
    wanted = [number for number in (own, echoed) if number is not None]
    if max_tokens == 0 and not wanted:
        if not echo:
            raise ApiError(
                "max_tokens is 0; it must be at least 1, or echo true or prompt_logprobs set",
                param="max_tokens",
            )
        return 0
    return max(wanted, default=None)


def _top_logprobs(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    limits: dict[str, Any] = {"integer": True, "low": 0, "high": MAX_TOP_LOGPROBS}
    if not chat:
        logprobs: int | None = _number(fields, "logprobs", None, **limits)
        return logprobs
    wanted = _flag(fields, "logprobs")
    top: int = _number(fields, "top_logprobs", 0, **limits)
    if top and not wanted:
        raise ApiError("top_logprobs requires logprobs: true", param="top_logprobs")
    return top if wanted else None


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(
            "stop must be a non-empty string or a list of non-empty strings", param="stop"
        )
    if len(stops) > MAX_STOPS:
        raise ApiError(f"stop has {len(stops)} strings; give at most {MAX_STOPS}", param="stop")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARACTERS:
        raise ApiError(
            f"stop has a string of {longest:,} characters; give at most {MAX_STOP_CHARACTERS:,}",
            param="stop",
        )
    return tuple(stops)


def _flag(
    fields: Mapping[str, Any], name: str, label: str | None = None, *, default: bool = False
) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        param = label or name
        raise ApiError(f"{param} is {value!r}; it must be true or false", param=param)
    return value


def _number(
    fields: Mapping[str, Any],
    name: str,
    default: Any,
    *,
    low: float,
    high: float,
    integer: bool = False,
) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    kind = "an integer" if integer else "a number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (integer and value != int(value)):
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."
        span = f"{low:,} to {high:,}" if integer else f"{low:g} to {high:g}"
        raise ApiError(f"{name} is {shown}; it must be {kind} from {span}", param=name)
    return int(value) if integer else float(value)
