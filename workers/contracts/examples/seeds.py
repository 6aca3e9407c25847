"""Seed prompts: lines with `prompt`, `instruction` or messages, perhaps a task type and an answer.

Does not depend on files or methods.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from workers.contracts.examples.example import LineError
from workers.contracts.specs.finetuning.produce import TaskType

_EXPECTED = 'Write {"prompt": "…"} on every line.'


@dataclass(frozen=True, slots=True)
class Seed:
    """A prompt with its line number and, if the line has them, task type and known answer."""

    prompt: str
    line: int
    task_type: TaskType | None = None
    answer: str | None = None


def parse_seed(text: str | bytes, number: int, *, needs_answer: bool = False) -> Seed:
    """The seed of one line. Raises LineError."""
    try:
        line = json.loads(text)
    except UnicodeDecodeError:
        raise LineError("is not UTF-8 text", "Convert the file with iconv -t UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"is not JSON: {error}", _EXPECTED) from None
    if not isinstance(line, dict):
        raise LineError("is not an object", _EXPECTED)
    prompt = _prompt(line)
    if prompt is None:
        raise LineError("has no prompt", _EXPECTED)
    kind = line.get("task_type")
    if kind is not None and kind not in get_args(TaskType):
        raise LineError(
            f"has the unknown task_type {str(kind)[:40]!r}",
            f"Use one of {', '.join(get_args(TaskType))}.",
        )
    answer = line.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if needs_answer and not (isinstance(answer, str) and answer.strip()):
        raise LineError(
            "has no answer, which the verifier compares with", 'Use {"prompt": "…", "answer": "…"}.'
        )
    return Seed(prompt, number, kind, answer if isinstance(answer, str) else None)


def _prompt(line: dict[str, Any]) -> str | None:
    """The first user message, or the text of `prompt` or `instruction`."""
    messages = line.get("prompt") if isinstance(line.get("prompt"), list) else line.get("messages")
    if isinstance(messages, list):
        texts = (
            each.get("content")
            for each in messages
            if isinstance(each, dict) and each.get("role") == "user"
        )
        first = next(texts, None)
        return first if isinstance(first, str) and first.strip() else None
    for name in ("prompt", "instruction"):
        if isinstance(line.get(name), str) and line[name].strip():
            return str(line[name])
    return None
