"""Checks messages and tools of a line, and converts ShareGPT turns to messages.

Does not depend on files or formats of whole lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workers.contracts.examples.example import LineError, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


def check_messages(value: Any, field: str) -> list[Message]:
    """The messages of `field`. Raises LineError for a message without a role or a content."""
    if not isinstance(value, list) or not value:
        raise LineError(
            f"{field} is not a list of messages", 'Use [{"role": "user", "content": "…"}].'
        )
    return [_check_message(each, f"{field}.{number}") for number, each in enumerate(value)]


def check_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The functions of a line: a list, or JSON text of one. Raises LineError."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise LineError(f"tools is not JSON: {error}", "Use a list of functions.") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise LineError("tools is not a list of objects", "Use a list of functions.")
    return tuple(value)


def check_answered(messages: Sequence[Message], field: str) -> None:
    """Raises LineError unless the assistant has the last turn."""
    if messages[-1]["role"] != "assistant":
        raise LineError(
            f"{field} ends with a turn of {messages[-1]['role']}, so there is no answer to learn",
            "End with a message of the assistant.",
        )


def from_turns(value: Any, field: str) -> list[Message]:
    """ShareGPT's turns `{from, value}` as messages. Raises LineError for unknown speakers."""
    if not isinstance(value, list) or not value:
        raise LineError(
            f"{field} is not a list of turns", 'Use [{"from": "human", "value": "…"}, …].'
        )
    return [from_turn(each, f"{field}.{number}") for number, each in enumerate(value)]


def from_turn(value: Any, field: str) -> Message:
    """One turn `{from, value}` as a message; messages are accepted too. Raises LineError."""
    if isinstance(value, dict) and "role" in value:
        return _check_message(value, field)
    speaker = value.get("from") if isinstance(value, dict) else None
    text = value.get("value") if isinstance(value, dict) else None
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise LineError(f"{field} is not a turn", 'Use {"from": "human", "value": "…"}.')
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(text, field)}
    if speaker not in _SHAREGPT:
        known = ", ".join([*_SHAREGPT, "function_call"])
        raise LineError(f"{field}.from is {speaker!r}", f"Use one of {known}.")
    return {"role": _SHAREGPT[speaker], "content": text}


def _check_message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise LineError(f"{field} is not an object", 'Use {"role": "user", "content": "…"}.')
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise LineError(f"{field}.role is {role!r}", f"Use one of {', '.join(ROLES)}.")
    if content is None and role == "assistant" and value.get("tool_calls"):
        return {**value, "content": ""}
    if isinstance(content, list):
        content = _joined(content, field)
    if not isinstance(content, str):
        raise LineError(f"{field}.content is not a text", 'Use "content": "…".')
    if role == "assistant" and not content.strip() and not value.get("tool_calls"):
        raise LineError(f"{field} is an empty answer", "Write a text, or remove the line.")
    return {**value, "content": content}


def _joined(parts: list[Any], field: str) -> str:
    """The text of OpenAI's content parts."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise LineError(f"{field}.content.{number} is not a text part", "Use text parts only.")
    return "".join(text for text in texts if isinstance(text, str))


def _calls(text: str, field: str) -> list[dict[str, Any]]:
    """The value of a `function_call` turn as tool calls."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LineError(
            f"{field}.value is not JSON: {error}", 'Use {"name": …, "arguments": {…}}.'
        ) from None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(each, dict) and "name" in each for each in calls):
        raise LineError(
            f"{field}.value is not a function call", 'Use {"name": …, "arguments": {…}}.'
        )
    return [
        {
            "type": "function",
            "function": {"name": each["name"], "arguments": each.get("arguments", {})},
        }
        for each in calls
    ]
