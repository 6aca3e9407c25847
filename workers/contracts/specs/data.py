"""DataSpec: training data (text, JSON lines or token files, mixed by weight) and its tokenizer.

Does not read files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Problem, Refused, problem

# formats whose lines are examples of fine-tuning objectives
ExampleFormat = Literal[
    "messages", "prompt_completion", "preference", "labelled", "alpaca", "sharegpt"
]
EXAMPLE_FORMATS: tuple[ExampleFormat, ...] = get_args(ExampleFormat)
Format = Literal["text", "jsonl", "tokens"] | ExampleFormat
# suffixes of a folder's files, by format
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt",),
    "jsonl": (".jsonl",),
    "tokens": (".bin", ".npy"),
    **dict.fromkeys(EXAMPLE_FORMATS, (".jsonl",)),
}
BYTES = 256
_NAME = r"^[A-Za-z0-9_.-]{1,60}$"
# a registered data set: its name, or its name and version
DATA_SET_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}"
DataSetRef = Annotated[str, Field(pattern=rf"^{DATA_SET_NAME}(@[1-9][0-9]{{0,8}})?$")]
# a data set in place of the path of an input file: dataset:NAME or dataset:NAME@VERSION
DATA_SET_PREFIX = "dataset:"
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def data_set_in_text(text: str, *, after_equals: bool = False) -> str | None:
    """`chats@3` of the text `dataset:chats@3`; None of a path or another text.

    With `after_equals` also of an option such as `--data=dataset:chats@3`.
    """
    if after_equals and not text.startswith(DATA_SET_PREFIX):
        text = text.partition("=")[2]
    return text.removeprefix(DATA_SET_PREFIX) if text.startswith(DATA_SET_PREFIX) else None


class BpeSpec(Contract):
    """A byte-level BPE of at most `vocab` tokens (arXiv 1508.07909), trained on the run's own text.

    It has one special token, `<|endoftext|>`, and is saved with the run's checkpoints as
    tokenizer.json.
    """

    vocab: Annotated[int, Field(ge=BYTES + 1)]


TokenizerRef = Annotated[
    Annotated[str, Tag("@path")] | Annotated[BpeSpec, Tag("@bpe")],
    Discriminator(lambda value: "@path" if isinstance(value, str) else "@bpe"),
]


class SourceSpec(Contract):
    """One of several sources, a preset, a path or a data set, with its `weight` in the mix of
    samples.

    Its loss is the metric `loss/{name}`; the default name is the preset's or the file's stem. For
    `dataset` see `DataSpec`.
    """

    preset: Literal["shakespeare"] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    dataset: DataSetRef | None = None
    fingerprint: Fingerprint | None = None
    format: Format = "text"
    document_end: Annotated[int, Field(ge=0)] | None = None
    name: Annotated[str, Field(pattern=_NAME)] | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _one(self) -> SourceSpec:
        place = self.path if self.path is not None else self.dataset
        if (self.preset is None) == (place is None):
            message = (
                "has neither a preset nor a path nor a data set"
                if place is None
                else f"has both a preset and a {'path' if self.path else 'data set'}"
            )
            raise Refused(f"a source {message}", "Use one of them.")
        return self

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer reads the source."""
        return self.preset is not None or self.format != "tokens"

    @property
    def label(self) -> str:
        """The source's name in metrics and messages."""
        if self.name is not None:
            return self.name
        stem = (
            self.dataset.partition("@")[0]
            if self.dataset is not None
            else PurePath(str(self.path)).stem
        )
        return self.preset or re.sub(r"[^A-Za-z0-9_.-]", "_", stem)[:60] or "data"


class DataSpec(Contract):
    """The data: a preset that ships with the project, files under allowed data roots, or sources.

    `path` is a file, or a folder whose files (`SUFFIXES`) are read in the order of their names.
    `tokenizer` is a tokenizer.json, a folder with one, or a BPE to be trained; the default is the
    tokenizer of the initial weights (`train.init_from`), or else raw bytes, token ids 0 to 255.
    `document_end` is the token that ends a document in token files that do not specify it. With
    `document_masks` attention stays within a document if several are packed into a sequence;
    default: if JSON lines or token files mark document boundaries.

    `dataset` names a registered data set, `name` or `name@3`; a submit sets its version, `path` and
    `fingerprint`.
    """

    preset: Literal["shakespeare"] | None = None
    path: Annotated[str, Field(min_length=1)] | None = None
    dataset: DataSetRef | None = None
    fingerprint: Fingerprint | None = None
    format: Format = "text"
    tokenizer: TokenizerRef | None = None
    document_end: Annotated[int, Field(ge=0)] | None = None
    sources: Annotated[list[SourceSpec], Field(min_length=1, max_length=100)] | None = None
    document_masks: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _default(cls, data: Any) -> Any:
        if isinstance(data, dict) and all(
            data.get(name) is None for name in ("preset", "path", "dataset", "sources")
        ):
            return {**data, "preset": "shakespeare"}
        return data

    @model_validator(mode="after")
    def _one(self) -> DataSpec:
        named = self.path is not None or self.dataset is not None
        if self.preset is not None and named:
            other = "path" if self.path is not None else "data set"
            raise Refused(f"data has both a preset and a {other}", "Use one of them.")
        if self.sources is not None:
            if self.preset is not None or named:
                raise Refused(
                    "data has sources and also a preset, path or data set",
                    "Use the preset, path or data set as one of the sources.",
                )
            names = [source.label for source in self.sources]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise Refused(
                    f"two sources are named {twice}",
                    "Use a different name for each.",
                    field="sources",
                )
        return self

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer: a named one, or the bytes of a text source."""
        return self.tokenizer is not None or any(source.is_text for _, source in self.parts())

    def parts(self, field: str = "data") -> Iterator[tuple[str, SourceSpec]]:
        """Every source with its field name; data without `sources` is one source."""
        if self.sources is None:
            yield (
                field,
                SourceSpec(
                    preset=self.preset,
                    path=self.path,
                    dataset=self.dataset,
                    fingerprint=self.fingerprint,
                    format=self.format,
                    document_end=self.document_end,
                ),
            )
            return
        for index, source in enumerate(self.sources):
            yield f"{field}.sources.{index}", source


def data_problems(
    data: DataSpec,
    *,
    vocab: int,
    field: str = "data",
    training: DataSpec | None = None,
    examples: tuple[ExampleFormat, ...] = (),
) -> list[Problem]:
    """What in `data` does not match a model's vocabulary or, for validation, `training` data.

    `examples`: the formats that the run's objective trains on; empty for plain text.
    """
    problems = []
    if isinstance(data.tokenizer, BpeSpec):
        if data.tokenizer.vocab > vocab:
            message = (
                f"a tokenizer of {data.tokenizer.vocab} tokens is requested, the model's "
                f"vocabulary has {vocab}"
            )
            problems.append(problem(f"{field}.tokenizer.vocab", message, f"Use at most {vocab}."))
    elif (
        data.tokenizer in (None, "bytes") and vocab < BYTES and (data.tokenizer or training is None)
    ):
        for place, source in data.parts(field):
            if source.is_text:
                message = f"the text is bytes 0 to 255, the vocabulary has {vocab}"
                problems.append(problem(place, message, f"Use vocab {BYTES}."))
    if training is not None and data.tokenizer not in (None, training.tokenizer):
        trained = isinstance(data.tokenizer, BpeSpec)
        if trained or any(source.is_text for _, source in training.parts()):
            message = "validation text is read by another tokenizer than the training text"
            problems.append(
                problem(f"{field}.tokenizer", message, "Omit the field to use the run's own.")
            )
    for place, source in data.parts(field):
        if source.dataset is not None and source.path is None:
            message = f"the data set {source.dataset} is known to Orrery only"
            problems.append(problem(f"{place}.dataset", message, "Submit the run, or give a path."))
        if examples and source.format not in examples:
            actual = source.preset or f"format {source.format}"
            message = f"this objective trains on examples, the data is {actual}"
            problems.append(
                problem(f"{place}.format", message, f"Use format {' or '.join(examples)}.")
            )
        if source.format in EXAMPLE_FORMATS and not examples:
            message = f"{source.format} lines are for fine-tuning, this run trains on plain text"
            hint = 'Use train.objective "sft", or format jsonl with a field `text` per line.'
            problems.append(problem(f"{place}.format", message, hint))
        if source.document_end is not None and source.document_end >= vocab:
            message = f"token {source.document_end} is outside the model's vocabulary of {vocab}"
            problems.append(problem(f"{place}.document_end", message, f"Use at most {vocab - 1}."))
    return problems
