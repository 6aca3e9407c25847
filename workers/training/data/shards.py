"""Token files: memory-mapped `.npy` and `.bin`, their JSON descriptions, and writing them.

Reads plain little-endian files (nanoGPT's) and files with llm.c's header. Does not depend on text.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.runtime.exit_codes import UserError
from workers.training.data.stream import Tokens

_DTYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4"}
# karpathy/llm.c, dev/data/data_common.py: 256 int32 of header, magic number to width; the third is
# the count
_LLMC = {20240520: "uint16", 20240801: "uint32"}
_LLMC_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """One file's ids; `starts` of documents and `document_end`, the token after each, if known."""

    tokens: Tokens
    starts: NDArray[np.int64] | None = None
    document_end: int | None = None
    tokenizer: str | None = None


def description_path(path: Path) -> Path:
    """The path of a token file's description `{dtype, tokens, vocab?, document_end?, tokenizer?,
    starts?}`.
    """
    return path.with_name(path.name + ".json")


def open_shard(path: Path, *, vocab: int) -> Shard:
    """Map a file. Raises UserError if it is truncated, empty, of unknown type or has a larger
    vocabulary.

    Without a description a `.bin` is uint16, or uint32 if the model's vocabulary needs it.
    """
    description = _description(path)
    if description.get("vocab", 0) > vocab:
        message = f"its tokenizer has {description['vocab']} tokens, the model's vocabulary {vocab}"
        raise UserError(
            f"data.path: {path}: {message}. Use a model with vocab {description['vocab']} or more."
        )
    tokens = _array(path) if path.suffix == ".npy" else _raw(path, description.get("dtype"), vocab)
    if "tokens" in description and len(tokens) != description["tokens"]:
        message = (
            f"holds {len(tokens)} tokens, {description_path(path).name} has {description['tokens']}"
        )
        raise UserError(f"data.path: {path} {message}. Copy the file again.")
    try:
        starts = (
            np.load(path.with_name(description["starts"]), mmap_mode="r")
            if "starts" in description
            else None
        )
    except (OSError, ValueError, TypeError) as error:
        message = (
            f"names {description['starts']} for document starts, which cannot be read: {error}"
        )
        raise UserError(f"data.path: {description_path(path)} {message}. Copy it too.") from None
    return Shard(tokens, starts, description.get("document_end"), description.get("tokenizer"))


def write_shard(
    path: Path,
    documents: Iterable[Iterable[str]],
    *,
    encode: Callable[[Sequence[str]], list[list[int]]],
    vocab: int,
    separator: Sequence[int],
    document_end: int | None,
    tokenizer: str,
) -> None:
    """Tokenize documents, each given in chunks, into `path`. The description is written last.

    `separator` follows every document. `starts` point at the separator before a document, so that
    the separator predicts the document's first token and no token is predicted from another
    document. Raises UserError if the documents are empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f".{socket.gethostname()}.{os.getpid()}"
    dtype = "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"
    hidden = path.with_name(f".{path.name}{mark}")
    starts, written = [0], 0
    with open(hidden, "wb") as file:
        for texts, ends in _batched(documents):
            for ids, ended in zip(encode(texts), ends, strict=True):
                whole = [*ids, *separator] if ended else ids
                np.asarray(whole, dtype=_DTYPES[dtype]).tofile(file)
                written += len(whole)
                if ended:
                    starts.append(written - len(separator))
    if not written:
        hidden.unlink()
        raise UserError("data.path: the files contain no text. Use a file with text.")
    # not .npy: a folder's .npy files are read as token files
    starts_path = path.with_name(path.name + ".starts")
    hidden_starts = path.with_name(f".{path.name}{mark}.starts")
    with open(hidden_starts, "wb") as file:
        np.save(file, np.unique(np.asarray(starts, dtype=np.int64)))
    os.replace(hidden, path)
    os.replace(hidden_starts, starts_path)
    description = {
        "dtype": dtype,
        "tokens": written,
        "vocab": vocab,
        "tokenizer": tokenizer,
        "starts": starts_path.name,
    }
    if document_end is not None:
        description["document_end"] = document_end
    hidden.write_text(json.dumps(description) + "\n", encoding="utf-8")
    os.replace(hidden, description_path(path))


_BATCH_CHARACTERS = 1 << 21


def _batched(documents: Iterable[Iterable[str]]) -> Iterable[tuple[list[str], list[bool]]]:
    """Chunks in batches that a tokenizer's threads share, and whether each ends its document."""
    texts: list[str] = []
    ends: list[bool] = []
    held = 0
    for pieces in documents:
        for text in pieces:
            texts.append(text)
            ends.append(False)
            held += len(text)
            if held > _BATCH_CHARACTERS:
                # the last chunk waits: only the next one shows whether it ends its document
                yield texts[:-1], ends[:-1]
                texts, ends, held = texts[-1:], ends[-1:], len(texts[-1])
        if ends:
            ends[-1] = True
    yield texts, ends


def _description(path: Path) -> dict[str, Any]:
    file = description_path(path)
    if not file.is_file():
        return {}
    hint = f"Write {{'dtype': 'uint16', 'tokens': N}}, or remove {file.name}."
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(description, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise UserError(f"data.path: {file} is not JSON: {error}. {hint}") from None
    numbers = [description.get(name, 0) for name in ("tokens", "vocab", "document_end")]
    if description.get("dtype", "uint16") not in _DTYPES or not all(
        isinstance(number, int) for number in numbers
    ):
        raise UserError(
            f"data.path: {file} has dtype {description.get('dtype')} and numbers {numbers}. {hint}"
        )
    return description


def _array(path: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise UserError(
            f"data.path: {path} is not an .npy array: {error}. Write a flat uint16 array."
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        shape = f"{tokens.dtype} of shape {tokens.shape}"
        raise UserError(f"data.path: {path} holds {shape}. Use a flat array of uint16 or uint32.")
    if not len(tokens):
        raise UserError(f"data.path: {path} is empty. Use a file with tokens.")
    return tokens


def _raw(path: Path, named: str | None, vocab: int) -> Tokens:
    size = path.stat().st_size
    if not size:
        raise UserError(f"data.path: {path} is empty. Use a file with tokens.")
    head = (
        np.fromfile(path, dtype="<i4", count=3)
        if size >= _LLMC_HEADER_BYTES
        else np.zeros(3, dtype="<i4")
    )
    if named is None and int(head[0]) in _LLMC:
        dtype = np.dtype(_DTYPES[_LLMC[int(head[0])]])
        if size != _LLMC_HEADER_BYTES + int(head[2]) * dtype.itemsize:
            held = (size - _LLMC_HEADER_BYTES) / dtype.itemsize
            message = f"holds {held:g} tokens, its header has {int(head[2])}"
            raise UserError(f"data.path: {path} {message}. Copy the file again.")
        return np.memmap(path, dtype=dtype, mode="r", offset=_LLMC_HEADER_BYTES)
    dtype = np.dtype(_DTYPES[named] if named else "<u2" if vocab <= 1 << 16 else "<u4")
    if size % dtype.itemsize:
        why = "" if named else f" for a vocabulary of {vocab}"
        message = f"{size} bytes are not a multiple of {dtype.name}{why}"
        raise UserError(
            f"data.path: {path}: {message}. Copy it again, or .npy, which stores its type."
        )
    return np.memmap(path, dtype=dtype, mode="r")
