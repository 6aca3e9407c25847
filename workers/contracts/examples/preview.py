"""PreviewRequest: which file to show as a model would see it, and how.

Does not read files.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.contracts.base import Contract
from workers.contracts.examples.example import Shape
from workers.contracts.specs.data import ExampleFormat
from workers.contracts.specs.model import Positive


class PreviewRequest(Contract):
    """A preview of the first `lines` lines of `path`, with the tokens of the first `samples`.

    Without `format` that of the first line's fields. `tokenizer` is a tokenizer.json, a folder with
    one or weights with one; without it, raw bytes. The other fields are those of a training run.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    format: ExampleFormat | None = None
    tokenizer: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    template: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    seq_len: Annotated[Positive, Field(le=1_000_000)] = 1024
    packing: bool = True
    train_on: Literal["assistant", "completion", "all"] = "assistant"
    lines: Annotated[Positive, Field(le=5000)] = 1000
    samples: Annotated[Positive, Field(le=50)] = 10

    def train_on_for(self, shape: Shape) -> Literal["assistant", "completion", "all"]:
        """What is trained: of pairs and labelled examples the answers."""
        return self.train_on if shape == "answers" else "completion"
