"""Lines of each format of `data.format` as examples.

messages, prompt_completion, preference, labelled, alpaca and sharegpt (with LLaMA-Factory's
preference and label fields). Does not read files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from workers.contracts.examples.example import (
    Completion,
    Dialogue,
    Example,
    LineError,
    Message,
    Text,
)
from workers.contracts.examples.messages import (
    check_answered,
    check_messages,
    check_tools,
    from_turn,
    from_turns,
)
from workers.contracts.specs.data import ExampleFormat

_EXPECTED: dict[ExampleFormat, str] = {
    "messages": 'Write {"messages": [{"role": "user", "content": "…"}, …]}.',
    "prompt_completion": 'Write {"prompt": "…", "completion": "…"}.',
    "preference": 'Write {"prompt": "…", "chosen": "…", "rejected": "…"}.',
    "labelled": 'Write {"prompt": "…", "completion": "…", "label": true}.',
    "alpaca": 'Write {"instruction": "…", "input": "…", "output": "…"}.',
    "sharegpt": 'Write {"conversations": [{"from": "human", "value": "…"}, …]}.',
}
_FIELDS: dict[ExampleFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "alpaca": ("instruction",),
    "sharegpt": ("conversations",),
}
_Line = Mapping[str, Any]


def parse_line(text: str | bytes, format_: ExampleFormat) -> Example:
    """The example of one JSON line. Raises LineError with what is wrong and a hint."""
    try:
        line = json.loads(text)
    except UnicodeDecodeError as error:
        raise LineError(
            f"byte {error.object[error.start]:#04x} at its offset {error.start} is not UTF-8",
            "Convert the file with iconv -t UTF-8.",
        ) from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}", "Use one JSON object per line.") from None
    if not isinstance(line, dict):
        raise LineError("not an object", _EXPECTED[format_])
    for field in _FIELDS[format_]:
        if line.get(field) is None:
            actual = ", ".join(map(str, line)) or "(none)"
            message = f"has no field {field}; its fields are {actual[:200]}"
            raise LineError(message, _hint(line, format_))
    try:
        return _PARSERS[format_](line)
    except RecursionError:
        raise LineError("nested too deeply", _EXPECTED[format_]) from None


def guess_format(text: str | bytes) -> ExampleFormat | None:
    """The format whose fields a JSON line has; None without a match."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _matching(line) if isinstance(line, dict) else None


def _matching(line: _Line) -> ExampleFormat | None:
    order: tuple[ExampleFormat, ...] = (
        "sharegpt",
        "alpaca",
        "preference",
        "labelled",
        "prompt_completion",
        "messages",
    )
    for format_ in order:
        if all(line.get(field) is not None for field in _FIELDS[format_]):
            return format_
    return None


def _hint(line: _Line, format_: ExampleFormat) -> str:
    other = _matching(line)
    return f"Use format {other}." if other not in (None, format_) else _EXPECTED[format_]


def _messages(line: _Line) -> Example:
    messages = check_messages(line["messages"], "messages")
    check_answered(messages, "messages")
    return Example((Dialogue(tuple(messages), len(messages) - 1),), tools=_tools(line))


def _prompt_completion(line: _Line) -> Example:
    text = _answered(line["prompt"], line["completion"], "completion")
    return Example((text,), tools=_tools(line))


def _labelled(line: _Line) -> Example:
    text = _answered(line["prompt"], line["completion"], "completion")
    return Example((text,), label=_label(line["label"], "label"), tools=_tools(line))


def _preference(line: _Line) -> Example:
    chosen, rejected = line["chosen"], line["rejected"]
    if line.get("prompt") is not None:
        pair = (
            _answered(line["prompt"], chosen, "chosen"),
            _answered(line["prompt"], rejected, "rejected"),
        )
    elif isinstance(chosen, str) and isinstance(rejected, str):
        pair = _split_texts(chosen, rejected)
    else:
        pair = _split_messages(chosen, rejected)
    return _pair(pair, line)


def _alpaca(line: _Line) -> Example:
    prompt = _alpaca_prompt(line)
    if line.get("chosen") is not None and line.get("rejected") is not None:
        return _pair(
            (
                _dialogue(prompt, _text(line, "chosen")),
                _dialogue(prompt, _text(line, "rejected")),
            ),
            line,
        )
    text = _dialogue(prompt, _text(line, "output"))
    return Example((text,), label=_kto_tag(line), tools=_tools(line))


def _sharegpt(line: _Line) -> Example:
    messages = from_turns(line["conversations"], "conversations")
    if isinstance(line.get("system"), str) and line["system"]:
        messages = [{"role": "system", "content": line["system"]}, *messages]
    if line.get("chosen") is not None and line.get("rejected") is not None:
        pair = tuple(
            Dialogue((*messages, _assistant(from_turn(line[name], name), name)), len(messages))
            for name in ("chosen", "rejected")
        )
        return _pair((pair[0], pair[1]), line)
    check_answered(messages, "conversations")
    text = Dialogue(tuple(messages), len(messages) - 1)
    return Example((text,), label=_kto_tag(line), tools=_tools(line))


_PARSERS: dict[ExampleFormat, Callable[[_Line], Example]] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "labelled": _labelled,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
}


def _answered(prompt: Any, answer: Any, field: str) -> Text:
    """A prompt with its answer: both strings, or messages on either side."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer.strip():
            raise LineError(f"{field} is empty", "Write a text, or remove the line.")
        return Completion(prompt, answer)
    before = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else check_messages(prompt, "prompt")
    )
    if isinstance(answer, str):
        return _dialogue(before, answer, field)
    after = check_messages(answer, field)
    check_answered(after, field)
    return Dialogue((*before, *after), len(before))


def _dialogue(prompt: list[Message], answer: str, field: str = "output") -> Dialogue:
    if not answer.strip():
        raise LineError(f"{field} is empty", "Write a text, or remove the line.")
    return Dialogue((*prompt, {"role": "assistant", "content": answer}), len(prompt))


def _split_texts(chosen: str, rejected: str) -> tuple[Text, Text]:
    """The pair of two whole texts: the prompt is what both begin with, to the end of a word."""
    common = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        common += 1
    common = max(chosen.rfind(gap, 0, common) + 1 for gap in " \n\t")
    if not common:
        raise LineError(
            "chosen and rejected have no common beginning", "Use a field prompt on every line."
        )
    return (
        _answered(chosen[:common], chosen[common:], "chosen"),
        _answered(rejected[:common], rejected[common:], "rejected"),
    )


def _split_messages(chosen: Any, rejected: Any) -> tuple[Text, Text]:
    one, other = check_messages(chosen, "chosen"), check_messages(rejected, "rejected")
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    if not common:
        raise LineError(
            "chosen and rejected begin with different messages", "Use the same prompt in both."
        )
    if common == min(len(one), len(other)):
        raise LineError(
            "one conversation of the pair begins the other", "Use two different answers."
        )
    for messages, field in ((one, "chosen"), (other, "rejected")):
        check_answered(messages, field)
    return Dialogue(tuple(one), common), Dialogue(tuple(other), common)


def _pair(pair: tuple[Text, Text], line: _Line) -> Example:
    if pair[0] == pair[1]:
        raise LineError("chosen and rejected are equal", "Remove the line.")
    margin = line.get("margin")
    if margin is None:
        return Example(pair, tools=_tools(line))
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise LineError(f"margin is {str(margin)[:40]!r}", "Use a number.")
    return Example(pair, margin=float(margin), tools=_tools(line))


def _alpaca_prompt(line: _Line) -> list[Message]:
    messages: list[Message] = []
    if line.get("system"):
        messages.append({"role": "system", "content": _text(line, "system")})
    history = line.get("history") or []
    if not isinstance(history, list):
        raise LineError("history is not a list", 'Use [["question", "answer"], …].')
    for number, turn in enumerate(history):
        if not (
            isinstance(turn, list)
            and len(turn) == 2
            and all(isinstance(each, str) for each in turn)
        ):
            raise LineError(
                f"history.{number} is not a pair of texts", 'Use ["question", "answer"].'
            )
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    parts = [_text(line, "instruction"), _text(line, "input") if line.get("input") else ""]
    return [*messages, {"role": "user", "content": "\n\n".join(part for part in parts if part)}]


def _assistant(message: Message, field: str) -> Message:
    if message["role"] != "assistant":
        raise LineError(
            f"{field} is a turn of {message['role']}", 'Use {"from": "gpt", "value": "…"}.'
        )
    return message


def _text(line: _Line, field: str) -> str:
    value = line.get(field)
    if not isinstance(value, str):
        raise LineError(f"{field} is not a text", f'Use "{field}": "…".')
    return value


def _label(value: Any, field: str) -> bool:
    if isinstance(value, bool):
        return value
    raise LineError(f"{field} is {str(value)[:40]!r}", "Use true or false.")


def _kto_tag(line: _Line) -> bool | None:
    return None if line.get("kto_tag") is None else _label(line["kto_tag"], "kto_tag")


def _tools(line: _Line) -> tuple[dict[str, Any], ...]:
    return check_tools(line.get("tools"))
