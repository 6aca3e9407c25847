"""A run's `data` as open sources: presets, text, JSON lines and token files, tokenized and mapped.

Does not depend on sequences, order or devices.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workers.contracts.specs.data import EXAMPLE_FORMATS, BpeSpec, DataSpec, SourceSpec
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.reading import example_texts
from workers.training.data.files import check_text, json_documents, list_files, text_chunks
from workers.training.data.shards import Shard, description_path, open_shard, write_shard
from workers.training.data.stream import Stream
from workers.training.data.tokenizer import BYTES, NAME, Tokenizer, load_tokenizer, train_bpe

_PRESETS = {"shakespeare": Path(__file__).parents[1] / "corpora" / "shakespeare.txt.gz"}
# of all sources together: a tokenizer's pairs converge long before
TRAINING_CHARACTERS = 1 << 28


@dataclass(frozen=True, slots=True)
class Source:
    """One source's tokens; `weight` is its share relative to the other sources."""

    name: str
    stream: Stream
    weight: float = 1.0


def open_tokenizer(data: DataSpec, *, vocab: int, checkpoints: Path) -> Tokenizer:
    """The tokenizer of text and JSON lines, trained once into `checkpoints` if the spec requests
    that.

    Raises UserError if it is unreadable, does not fit a model of `vocab`, or has no text to train
    on.
    """
    if data.tokenizer in (None, "bytes"):
        return BYTES
    if isinstance(data.tokenizer, str):
        return load_tokenizer(Path(data.tokenizer), vocab=vocab)
    assert isinstance(data.tokenizer, BpeSpec)
    file = checkpoints / NAME
    if not file.is_file():
        sources = [source for _, source in data.parts() if source.is_text]
        if not sources:
            raise UserError(
                "data.tokenizer: token files have no text to train a tokenizer. Use a path, or "
                "omit data.tokenizer."
            )
        share = TRAINING_CHARACTERS // len(sources)
        texts = (text for source in sources for text in _limit_text(share, _read_text(source)))
        train_bpe(texts, vocab=data.tokenizer.vocab, path=file)
    return load_tokenizer(file, vocab=vocab)


def open_sources(data: DataSpec, *, tokenizer: Tokenizer, vocab: int, cache: Path) -> list[Source]:
    """Every source of `data`. Text is tokenized into `cache` once and mapped from there.

    Raises UserError for sources that are missing, empty, unreadable, truncated, not UTF-8 (with the
    offset), not `{"text": ...}` (with the line), or made with another tokenizer.
    """
    sources = []
    for _, part in data.parts():
        try:
            stream = _stream(
                part, tokenizer, vocab, cache, check_tokenizer=data.tokenizer is not None
            )
        except PermissionError as error:
            raise UserError(
                f"data.path: {error.filename} is not readable by this user. Run chmod +r on it."
            ) from None
        sources.append(Source(part.label, stream, part.weight))
    return sources


def _stream(
    part: SourceSpec, tokenizer: Tokenizer, vocab: int, cache: Path, *, check_tokenizer: bool
) -> Stream:
    if part.preset is not None and tokenizer is BYTES:
        data_bytes = np.frombuffer(
            gzip.decompress(_PRESETS[part.preset].read_bytes()), dtype=np.uint8
        )
        return Stream([data_bytes], starts=np.zeros(1, dtype=np.int64))
    files = (
        [_PRESETS[part.preset]]
        if part.preset is not None
        else list_files(Path(str(part.path)), part.format)
    )
    if not part.is_text:
        return _token_files(part, files, tokenizer, vocab, check_tokenizer=check_tokenizer)
    if part.format == "text" and tokenizer is BYTES:
        for file in files:
            check_text(file)
        arrays = [np.memmap(file, dtype=np.uint8, mode="r") for file in files]
        ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        return Stream(arrays, starts=np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]]))
    shard = _tokenize(part, files, tokenizer, cache)
    return Stream([shard.tokens], starts=shard.starts, document_end=shard.document_end)


def _token_files(
    part: SourceSpec, files: list[Path], tokenizer: Tokenizer, vocab: int, *, check_tokenizer: bool
) -> Stream:
    shards = [open_shard(file, vocab=vocab) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if check_tokenizer and shard.tokenizer not in (None, tokenizer.digest):
            message = (
                f"{description_path(file)} names another tokenizer ({shard.tokenizer[:12]}, not "
                f"{tokenizer.digest[:12]})"
            )
            raise UserError(f"data.tokenizer: {message}. Use the tokenizer that made it.")
    arrays = [shard.tokens for shard in shards]
    starts = [shard.starts for shard in shards]
    if part.document_end is None and all(each is not None for each in starts):
        offsets = np.cumsum([0, *(len(array) for array in arrays)])
        placed = [
            each + offset for each, offset in zip(starts, offsets, strict=False) if each is not None
        ]
        return Stream(arrays, starts=np.unique(np.concatenate(placed)).astype(np.int64))
    document_ends = (
        {part.document_end}
        if part.document_end is not None
        else {shard.document_end for shard in shards}
    )
    # boundaries are unknown unless all files have the same end token
    return Stream(arrays, document_end=document_ends.pop() if len(document_ends) == 1 else None)


def _tokenize(part: SourceSpec, files: list[Path], tokenizer: Tokenizer, cache: Path) -> Shard:
    """Tokenize into `cache` unless already done; the file name hashes the files' sizes and
    times.
    """
    stamps = [
        (str(file.resolve()), stat.st_size, stat.st_mtime_ns)
        for file in files
        for stat in [file.stat()]
    ]
    key = hashlib.sha256(repr((part.format, tokenizer.digest, stamps)).encode()).hexdigest()[:16]
    target = cache / f"{key}.bin"
    if not description_path(target).is_file():
        write_tokens(target, documents(part, files), tokenizer)
    return open_shard(target, vocab=tokenizer.vocab)


def write_tokens(target: Path, texts: Iterable[Iterable[str]], tokenizer: Tokenizer) -> None:
    """Write documents, each in chunks, as a token file that names its tokenizer."""
    write_shard(
        target,
        texts,
        encode=tokenizer.encode,
        vocab=tokenizer.vocab,
        separator=tokenizer.separator,
        document_end=tokenizer.document_end,
        tokenizer=tokenizer.digest,
    )


def documents(part: SourceSpec, files: list[Path]) -> Iterator[Iterable[str]]:
    """Each document in chunks: the text of a JSON line or of an example, or a full file."""
    if part.preset is not None:
        yield [gzip.decompress(files[0].read_bytes()).decode("utf-8")]
        return
    for file in files:
        if part.format == "jsonl":
            yield from ([text] for text in json_documents(file))
        elif part.format in EXAMPLE_FORMATS:
            yield from ([text] for text in example_texts([file], part.format))
        else:
            yield text_chunks(file)


def _read_text(part: SourceSpec) -> Iterator[str]:
    files = (
        [_PRESETS[part.preset]]
        if part.preset is not None
        else list_files(Path(str(part.path)), part.format)
    )
    for pieces in documents(part, files):
        yield from pieces


def _limit_text(characters: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)
