"""Example: one line of fine-tuning data, whatever its format.

Does not depend on formats, files or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from workers.contracts.base import with_hint

# `{role, content, tool_calls?, ...}`: what chat templates read
Message = dict[str, Any]
# answers: one text with answers; pairs: a chosen and a rejected one; labels: one with a label
Shape = Literal["answers", "pairs", "labels"]


class LineError(ValueError):
    """A line that is not an example: what is wrong and a hint; the reader knows the line."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(with_hint(message, hint))
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages that a chat template formats; those from index `answer` on are the answer."""

    messages: tuple[Message, ...]
    answer: int

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the answer."""
        return self.messages[: self.answer]

    def texts(self) -> Iterator[str]:
        """The contents of all messages."""
        yield from (text for each in self.messages if isinstance(text := each["content"], str))


@dataclass(frozen=True, slots=True)
class Completion:
    """Plain text without a template: `answer` continues `prompt`."""

    prompt: str
    answer: str

    def texts(self) -> Iterator[str]:
        """The prompt with its completion."""
        yield self.prompt + self.answer


Text = Dialogue | Completion


@dataclass(frozen=True, slots=True)
class Example:
    """`texts` is one text with its answer, or the chosen and the rejected one of a pair.

    `label` is true for a good labelled answer; `margin` is by how much the chosen answer is
    better. `tools` are the functions that the template shows to the model.
    """

    texts: tuple[Text, ...]
    label: bool | None = None
    margin: float = 0.0
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def shape(self) -> Shape:
        """What kind of objective the example is for."""
        if self.label is not None:
            return "labels"
        return "pairs" if len(self.texts) == 2 else "answers"
