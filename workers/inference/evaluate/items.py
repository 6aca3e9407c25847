"""Item: what an evaluate run evaluates. Does not depend on files or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workers.inference.generate.prompts import PromptLine


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """One item to evaluate: `text` is a document or a finished answer, else `prompt` is set.

    `right` is the index of the correct choice.
    """

    id: Any
    text: str | None = None
    prompt: PromptLine | None = None
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    right: int | None = None
