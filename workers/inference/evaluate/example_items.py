"""Held-out lines of fine-tuning data as items: prompts with their answers, and pairs as choices.

Does not depend on tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.contracts.examples.example import Completion, Example, LineError, Text
from workers.contracts.examples.formats import parse_line
from workers.contracts.specs.data import ExampleFormat
from workers.inference.evaluate.items import EvaluationItem
from workers.inference.generate.prompts import PromptLine
from workers.runtime.exit_codes import UserError


def read_examples(path: Path, format_: ExampleFormat, field: str) -> list[EvaluationItem]:
    """The last tenth of a file's examples, as training holds out; at least one of them.

    An answer is a reference of its prompt; a pair is a question whose correct choice is the chosen
    answer. Bad labelled answers are left out. Raises UserError that names the line.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    examples = [each for file in files for each in _examples(file, format_, field)]
    held_out = max(len(examples) // 10, min(1, len(examples) - 1))
    items = [_item(*each) for each in examples[len(examples) - held_out :]]
    return [item for item in items if item is not None]


def _examples(path: Path, format_: ExampleFormat, field: str) -> Iterator[tuple[int, Example]]:
    try:
        rows = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(
            f"{field}: {path} cannot be read: {error.strerror}; give an existing file"
        ) from None
    for number, row in enumerate(rows, 1):
        if row.strip():
            try:
                yield number, parse_line(row, format_)
            except LineError as error:
                raise UserError(f"{field}: {path} line {number}: {error}") from None


def _item(number: int, example: Example) -> EvaluationItem | None:
    from workers.inference.evaluate.items import EvaluationItem

    if example.label is False:
        return None
    prompt = _prompt(number, example.texts[0])
    answers = tuple(_answer(text) for text in example.texts)
    if len(answers) == 2:
        return EvaluationItem(number, None, prompt, (answers[0],), answers, 0)
    return EvaluationItem(number, None, prompt, answers)


def _prompt(number: int, text: Text) -> PromptLine:
    if isinstance(text, Completion):
        return PromptLine(number, number, "prompt", text.prompt, {})
    # all turns before the last answer are its context
    last = max(i for i, each in enumerate(text.messages) if each["role"] == "assistant")
    messages: list[dict[str, Any]] = list(text.messages[:last])
    return PromptLine(number, number, "messages", messages, {})


def _answer(text: Text) -> str:
    if isinstance(text, Completion):
        return text.answer
    last = max(i for i, each in enumerate(text.messages) if each["role"] == "assistant")
    return str(text.messages[last]["content"] or "")
