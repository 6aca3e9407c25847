"""The data of a `samples_written` event: texts that a training run's model generated.

Does not depend on who writes or shows them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workers.contracts.base import Contract
from workers.contracts.specs.model import Count

SAMPLES_WRITTEN = "samples_written"


class WrittenText(Contract):
    """A generated continuation `text` of `prompt`; both are null if there is no tokenizer.

    `token_ids` are the new tokens only; `ended`: the last one ends a document.
    """

    prompt: str | None = None
    text: str | None = None
    prompt_ids: list[Count] = []
    token_ids: list[Count] = []
    ended: bool = False


class SamplesWritten(Contract):
    """All texts of one step; `cut_short`: the time limit stopped generation early."""

    step: Count
    samples: Annotated[list[WrittenText], Field(min_length=1, max_length=64)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    cut_short: bool = False
