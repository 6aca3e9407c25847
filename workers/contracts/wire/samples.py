"""The data of `samples_written` and `training_rows` events: texts that a training run's model
generated, and the first rows that it trains on.

Does not depend on who writes or shows them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count

SAMPLES_WRITTEN = "samples_written"
TRAINING_ROWS = "training_rows"


class WrittenText(WireContract):
    """A generated continuation `text` of `prompt`; both are null if there is no tokenizer.

    `token_ids` are the new tokens only; `ended`: the last one ends a document.
    """

    prompt: str | None = None
    text: str | None = None
    prompt_ids: list[Count] = []
    token_ids: list[Count] = []
    ended: bool = False


class SamplesWritten(WireContract):
    """All texts of one step; `cut_short`: the time limit stopped generation early."""

    step: Count
    samples: Annotated[list[WrittenText], Field(min_length=1, max_length=64)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    cut_short: bool = False


class TokenPiece(WireContract):
    """Consecutive tokens as text with the same loss weight; tokens of one character are joined."""

    weight: Annotated[float, Field(ge=0)] = 0.0
    tokens: list[str] = []


class RowDocument(WireContract):
    """One document of a row: an example of line `line`, or one answer of a pair (`role`).

    `pieces` show its first tokens; `hidden` counts those that are not shown.
    """

    line: Count = 0
    role: str = ""
    tokens: Count = 0
    trained: Count = 0
    hidden: Count = 0
    pieces: list[TokenPiece] = []


class TrainingRow(WireContract):
    """One sequence: its documents in order, then `padding` positions without tokens."""

    source: str = ""
    documents: list[RowDocument] = []
    padding: Count = 0


class TrainingRows(WireContract):
    """Rows of the first step in training order, with the chat template that formatted them.

    `template` is empty for plain texts.
    """

    seq_len: Count
    shape: str = ""
    template: str = ""
    rows: Annotated[list[TrainingRow], Field(max_length=64)] = []
