"""Lines of prompts for reinforcement learning: a prompt and, if known, its expected answer.

Does not read files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.contracts.examples.example import LineError, Message
from workers.contracts.examples.messages import check_messages, check_tools

_EXPECTED = 'Write {"prompt": "…", "answer": "…"}.'


@dataclass(frozen=True, slots=True)
class PromptLine:
    """`prompt` is a text, or messages that a chat template formats; `expected` is the answer."""

    prompt: str | tuple[Message, ...]
    expected: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


def parse_prompt(text: str | bytes, *, needs_answer: bool) -> PromptLine:
    """One JSON line. Raises LineError with what is wrong and a hint."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}", "Use one JSON object per line.") from None
    if not isinstance(line, dict) or line.get("prompt") is None:
        raise LineError("has no field prompt", _EXPECTED)
    expected = _expected(line)
    if needs_answer and expected is None:
        raise LineError("has no answer, which a reward compares with", _EXPECTED)
    prompt = line["prompt"]
    if not prompt:
        raise LineError("the prompt is empty", "Write a text, or remove the line.")
    tools = check_tools(line.get("tools"))
    if isinstance(prompt, str):
        return PromptLine(prompt, expected, tools)
    return PromptLine(tuple(check_messages(prompt, "prompt")), expected, tools)


def _expected(line: Mapping[str, Any]) -> str | None:
    value = line.get("answer", line.get("completion"))
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        messages = check_messages(value, "completion")
        return str(messages[-1].get("content") or "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LineError(f"answer is {str(value)[:40]!r}", "Use a text or a number.")
    return str(value)
