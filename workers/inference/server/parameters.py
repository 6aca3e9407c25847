"""A request's JSON to what the engine is asked: the fields of OpenAI's API, each checked, those
that we lack refused.

Knows words and Sampling; knows no HTTP. Raises ApiError that names the field.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.inference.sampling import Sampling
from workers.inference.server.errors import ApiError

# legal and without a meaning here
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
# beyond OpenAI's: the names that other open servers have for them
_OWN = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "return_token_ids",
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
    "chat": _SHARED | {"messages", "max_completion_tokens", "top_logprobs", "modalities"},
}
_NEUTRAL: dict[str, Callable[[Any], bool]] = {  # what we lack, and what of it asks for nothing
    "suffix": lambda given: given == "",
    "modalities": lambda given: given == ["text"],
}
# a stop text's characters: each new token is held against all of them
MOST_STOPS, MOST_STOP, MOST_TOP = 16, 1_000, 20
MOST_PROMPTS = 2_048


@dataclass(frozen=True, slots=True)
class Asked:
    """`sampling` but for the ends, which the model knows, and for `max_new_tokens` where `limited`
    is false.

    `top` is None without log-probabilities, else how many beside the chosen token are wanted.
    """

    chat: bool
    given: Mapping[str, Any]
    sampling: Sampling
    limited: bool
    stream: bool
    usage: bool
    top: int | None
    echo: bool
    ids: bool
    priority: int


def read_asked(body: Any, *, chat: bool) -> Asked:
    """Everything but prompt and messages."""
    if not isinstance(body, dict):
        raise ApiError('the body is no JSON object; send {"model": ..., ...}')
    given = {name: value for name, value in body.items() if value is not None}
    known = _FIELDS["chat" if chat else "completions"] | _OWN | _IGNORED
    if unknown := sorted(given.keys() - known):
        what = f"Unrecognized request argument supplied: {unknown[0]}"
        raise ApiError(f"{what}; this server knows {', '.join(sorted(known))}", param=unknown[0])
    for name, neutral in _NEUTRAL.items():
        if name in given and not neutral(given[name]):
            raise ApiError(
                f"{name}: this server does without; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    n = _number(given, "n", 1, whole=True, low=1, high=128)
    if given.get("best_of", n) != n:
        raise ApiError(
            f"best_of is {given['best_of']!r}; here it can only equal n, {n}", param="best_of"
        )
    most, top = _most(given, chat=chat), _top(given, chat=chat)
    stream, options = _flag(given, "stream"), given.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise ApiError(
            "stream_options is an object that goes with stream: true", param="stream_options"
        )
    seed = _number(given, "seed", None, whole=True, low=-(2**63), high=2**63 - 1)
    try:
        sampling = Sampling(
            max_new_tokens=most or 1,
            temperature=_number(given, "temperature", 1.0, low=0, high=2),
            top_p=_number(given, "top_p", 1.0, low=0, high=1),
            # -1 is no cut elsewhere
            top_k=max(0, _number(given, "top_k", 0, whole=True, low=-1, high=2**31 - 1)),
            min_p=_number(given, "min_p", 0.0, low=0, high=1),
            repetition_penalty=_number(given, "repetition_penalty", 1.0, low=0.01, high=100),
            presence_penalty=_number(given, "presence_penalty", 0.0, low=-2, high=2),
            frequency_penalty=_number(given, "frequency_penalty", 0.0, low=-2, high=2),
            seed=secrets.randbits(63) if seed is None else seed % 2**63,
            n=n,
            stop=_stops(given.get("stop", [])),
            ignore_eos=_flag(given, "ignore_eos"),
            logprobs=top is not None,
            top_logprobs=top or 0,
            logit_bias=given.get("logit_bias", {}),
            json_schema=_schema(given.get("response_format", {"type": "text"})),
            regex=given.get("regex"),
            grammar=given.get("grammar"),
        )
    except ValueError as error:
        raise of_engine(error) from None
    return Asked(
        chat=chat,
        given=given,
        sampling=sampling,
        limited=most is not None,
        stream=stream,
        usage=_flag(options, "include_usage", "stream_options.include_usage"),
        top=top,
        echo=_flag(given, "echo"),
        ids=_flag(given, "return_token_ids"),
        priority=_number(given, "priority", 0, whole=True, low=-100, high=100),
    )


def _schema(given: Any) -> Any:
    """What an answer's JSON must be like; None where it may be any text."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    told = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(told, dict) or told.get("schema") is None:
        message = "it must be text, json_object, or json_schema with {name, schema}"
        raise ApiError(f"response_format is {str(given)[:80]}; {message}", param="response_format")
    return told["schema"]


def of_engine(error: ValueError) -> ApiError:
    """What Sampling or the engine says begins with the parameter that is wrong, where one is."""
    first = str(error).split(" ", 1)[0]
    name = "response_format" if first == "json_schema" else first
    return ApiError(
        str(error), param=name if name in _FIELDS["chat"] | _FIELDS["completions"] | _OWN else None
    )


def messages_of(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`{role, content, ...}`, contents of text parts joined to one text."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one {role, content}", param="messages")
    found = []
    for place, each in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise ApiError(f"{where} must be an object with a role and a content", param=where)
        found.append({**each, "content": _content(each.get("content"), where)})
    return found


def prompts_of(given: Mapping[str, Any]) -> list[str | list[int]]:
    """Each a text or ids."""
    prompt = given.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]  # type: ignore[list-item]
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(each, str) or _is_ids(each) for each in prompt)
    ):
        if len(prompt) > MOST_PROMPTS:
            message = (
                f"prompt has {len(prompt):,} texts; at most {MOST_PROMPTS:,} go in one request"
            )
            raise ApiError(f"{message}, send the others in further ones", param="prompt")
        return prompt
    raise ApiError(
        "prompt must be a text, a list of token ids, or a list of either", param="prompt"
    )


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


def _content(given: Any, where: str) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list) and all(isinstance(part, dict) for part in given):
        for part in given:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(
                    f"{where}.content: this model reads parts of type text alone",
                    param=f"{where}.content",
                )
        return "".join(part["text"] for part in given)
    raise ApiError(f"{where}.content must be a text or a list of parts", param=f"{where}.content")


def _most(given: Mapping[str, Any], *, chat: bool) -> int | None:
    name = "max_completion_tokens" if chat and "max_completion_tokens" in given else "max_tokens"
    default = None if chat else 16  # OpenAI's
    found: int | None = _number(given, name, default, whole=True, low=1, high=2**31 - 1)
    return found


def _top(given: Mapping[str, Any], *, chat: bool) -> int | None:
    if not chat:
        found: int | None = _number(given, "logprobs", None, whole=True, low=0, high=MOST_TOP)
        return found
    wanted = _flag(given, "logprobs")
    top: int = _number(given, "top_logprobs", 0, whole=True, low=0, high=MOST_TOP)
    if top and not wanted:
        raise ApiError("top_logprobs wants logprobs: true", param="top_logprobs")
    return top if wanted else None


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise ApiError("stop must be a text that is not empty, or a list of such", param="stop")
    if len(stops) > MOST_STOPS:
        raise ApiError(
            f"stop has {len(stops)} texts; at most {MOST_STOPS} are looked for", param="stop"
        )
    if (longest := max(map(len, stops), default=0)) > MOST_STOP:
        raise ApiError(
            f"stop has a text of {longest:,} characters; at most {MOST_STOP:,} are looked for",
            param="stop",
        )
    return tuple(stops)


def _flag(given: Mapping[str, Any], name: str, told: str | None = None) -> bool:
    found = given.get(name, False)
    if not isinstance(found, bool):
        raise ApiError(f"{told or name} is {found!r}; it must be true or false", param=told or name)
    return found


def _number(
    given: Mapping[str, Any],
    name: str,
    default: Any,
    *,
    low: float,
    high: float,
    whole: bool = False,
) -> Any:
    found = given.get(name)
    if found is None:
        return default
    kind = "a whole number" if whole else "a number"
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or not low <= found <= high or (whole and found != int(found)):
        shown = repr(found) if len(repr(found)) < 60 else f"{repr(found)[:57]}..."
        span = f"{low:,} to {high:,}" if whole else f"{low:g} to {high:g}"
        raise ApiError(f"{name} is {shown}; it must be {kind} from {span}", param=name)
    return int(found) if whole else float(found)
