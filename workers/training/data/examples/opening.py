"""Opens a run's examples: reads and encodes every source once, then maps it from the cache.

Does not depend on sequences or order.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from workers.contracts.examples.example import Shape
from workers.contracts.specs.data import EXAMPLE_FORMATS, DataSpec, SourceSpec
from workers.models.errors import WeightsError
from workers.models.text.chat_format import ChatFormat, TrainOn
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.encoding import common_prompt, encode_example
from workers.training.data.examples.reading import LineProblems, read_lines
from workers.training.data.examples.store import Store, StoreWriter, open_store, write_store
from workers.training.data.files import list_files

_VERSION = 1  # of encoding; part of the cache's key


def open_examples(
    data: DataSpec, chat: ChatFormat, *, shape: Shape, train_on: TrainOn, vocab: int, cache: Path
) -> list[tuple[SourceSpec, Store]]:
    """Every source's encoded examples, with a cache in the folder `cache`.

    Raises UserError that lists lines which cannot be trained on, or for ids beyond `vocab`.
    """
    opened = []
    for field, part in data.parts():
        if part.path is None or part.format not in EXAMPLE_FORMATS:
            raise UserError(
                f"{field}.format: fine-tuning reads examples, this source is "
                f"{part.preset or part.format}. Use format messages or prompt_completion."
            )
        try:
            store = _open_source(part, chat, shape, train_on, cache)
        except PermissionError as error:
            raise UserError(
                f"data.path: {error.filename} is not readable by this user. Run chmod +r on it."
            ) from None
        largest = int(store.ids.max()) if len(store.ids) else 0
        if largest >= vocab:
            raise UserError(
                f"data.tokenizer: token id {largest} is outside the model's vocabulary of {vocab}. "
                f"Use the tokenizer of this model, or vocab {largest + 1} or more."
            )
        opened.append((part, store))
    return opened


def encode_files(
    part: SourceSpec, files: list[Path], chat: ChatFormat, *, shape: Shape, train_on: TrainOn
) -> Store:
    """Read and encode all lines. Raises UserError that lists the first problems."""
    writer, problems = StoreWriter(), LineProblems()
    assert part.format in EXAMPLE_FORMATS
    for line in read_lines(files, part.format, shape=shape):
        if line.problem:
            problems.add(line.where, line.problem)
        for example in line.examples:
            try:
                documents = encode_example(example, chat, train_on=train_on)
            except WeightsError as error:
                problems.add(line.where, str(error))
                continue
            if shape == "pairs" and not common_prompt(documents):
                problems.add(line.where, "the prompts of chosen and rejected have other tokens")
                continue
            writer.add(documents, label=example.label, margin=example.margin, line=line.number)
    problems.raise_if_any()
    store = writer.store()
    if not len(store):
        raise UserError(f"data.path: {files[0]} has no examples. Use a file with lines.")
    return store


def _open_source(
    part: SourceSpec, chat: ChatFormat, shape: Shape, train_on: TrainOn, cache: Path
) -> Store:
    files = list_files(Path(str(part.path)), part.format)
    folder = cache / f"examples-{_key(part, files, chat, shape, train_on)}"
    if not folder.is_dir():
        write_store(encode_files(part, files, chat, shape=shape, train_on=train_on), folder)
    return open_store(folder)


def _key(
    part: SourceSpec, files: list[Path], chat: ChatFormat, shape: Shape, train_on: TrainOn
) -> str:
    stamps = [
        (str(file.resolve()), stat.st_size, stat.st_mtime_ns)
        for file in files
        for stat in [file.stat()]
    ]
    format_ = (chat.template, sorted(chat.special.items()), chat.stops, chat.digest)
    parts = (_VERSION, part.format, shape, train_on, format_, stamps)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
