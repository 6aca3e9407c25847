"""What a run tells of the texts that its model wrote: the data of a `samples_written` event.

Knows neither who writes texts nor who shows them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workers.contracts.base import Contract
from workers.contracts.specs.model import Count

SAMPLES_WRITTEN = "samples_written"


class WrittenText(Contract):
    """`text` goes on from `prompt`; both are null where no tokenizer is known. `token_ids` are the
    new ones only.

    `ended`: by the token that ends a document.
    """

    prompt: str | None = None
    text: str | None = None
    prompt_ids: list[Count] = []
    token_ids: list[Count] = []
    ended: bool = False


class SamplesWritten(Contract):
    """All texts of a step.

    `cut_short`: the time for writing was over before they had their length.
    """

    step: Count
    samples: Annotated[list[WrittenText], Field(min_length=1, max_length=64)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    cut_short: bool = False
