"""Token ids of a data source as one flat array, memory-mapped where it is a file.

Reads presets, text, JSON lines and pre-tokenised files; does not know batches, order or devices.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.contracts.bodies import DataSpec
from workers.training.exits import UserError

Tokens = NDArray[np.unsignedinteger[Any]]

_PRESETS = {"shakespeare": Path(__file__).parent / "corpora" / "shakespeare.txt.gz"}
_CHUNK = 1 << 20
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def open_corpus(data: DataSpec, *, vocab: int, cache: Path) -> Tokens:
    """All token ids of `data`. What has to be tokenised is written to `cache` once and mapped from there.

    Raises UserError for a missing or unreadable file, text that is not UTF-8 (with the byte's offset), lines that are
    not `{"text": ...}`, and token files of another shape.
    """
    if data.preset is not None:
        return np.frombuffer(gzip.decompress(_PRESETS[data.preset].read_bytes()), dtype=np.uint8)
    assert data.path is not None
    path = Path(data.path)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise UserError(f"data.path: {path} {what}; try the path of a {data.format} file on this node")
    try:
        if data.format == "tokens":
            return _token_file(path, vocab)
        tokenizer = None if data.tokenizer in (None, "bytes") else str(data.tokenizer)
        if data.format == "text" and tokenizer is None:
            _check_utf8(path)
            return _mapped(path, np.uint8)
        return _tokenised(path, data.format, tokenizer, cache)
    except PermissionError:
        raise UserError(f"data.path: {path} may not be read by this user; try chmod +r") from None


def split_held_out(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Training tokens, and the last tenth held out for validation."""
    held = len(tokens) // 10
    return tokens[: len(tokens) - held], tokens[len(tokens) - held :]


def _mapped(path: Path, dtype: Any) -> Tokens:
    if path.stat().st_size < np.dtype(dtype).itemsize:
        raise UserError(f"data.path: {path} is empty; try a file with text")
    return np.memmap(path, dtype=dtype, mode="r")


def _token_file(path: Path, vocab: int) -> Tokens:
    """`.npy` with its own dtype, else raw little-endian: uint16, and uint32 where the vocabulary needs it."""
    if path.suffix == ".npy":
        try:
            tokens: Tokens = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise UserError(
                f"data.path: {path} is no .npy array: {error}; try np.save of a flat uint16 array"
            ) from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            shape = f"{tokens.dtype} of shape {tokens.shape}"
            raise UserError(f"data.path: {path} holds {shape}; try a flat array of uint16 or uint32")
        return tokens
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    if path.stat().st_size % dtype.itemsize:
        says = f"{path.stat().st_size} bytes are no whole number of {dtype.name}"
        raise UserError(f"data.path: {path}: {says} for a vocabulary of {vocab}; try .npy, which names its type")
    return _mapped(path, dtype)


def _check_utf8(path: Path) -> None:
    for _ in _decoded(path):
        pass


def _decoded(path: Path) -> Iterator[str]:
    """The file's text in pieces. Raises UserError with the offset of the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with open(path, "rb") as file:
        while True:
            piece = file.read(_CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                says = f"byte {error.object[error.start]:#04x} at offset {at} is not UTF-8"
                raise UserError(f"data.path: {path}: {says}; try converting the file: iconv -t UTF-8") from None
            offset += len(piece)
            yield text
            if not piece:
                return


def _tokenised(path: Path, format_: str, tokenizer: str | None, cache: Path) -> Tokens:
    """Tokenise into `cache` unless an earlier start of the run did; the name covers both files' size and time."""
    inputs = [path, *([Path(tokenizer)] if tokenizer else [])]
    stamps = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in inputs if p.exists() for s in [p.stat()]]
    key = hashlib.sha256(repr((format_, stamps)).encode()).hexdigest()[:16]
    encode, dtype, separator = _encoder(tokenizer)
    target = cache / f"{key}.{np.dtype(dtype).name}.bin"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        with open(beside, "wb") as file:
            for piece in _documents(path) if format_ == "jsonl" else _lines(path):
                np.asarray(encode(piece) + (separator if format_ == "jsonl" else []), dtype=dtype).tofile(file)
        os.replace(beside, target)
    return _mapped(target, dtype)


def _lines(path: Path) -> Iterator[str]:
    """The text in pieces that end with a line, so that no token is cut."""
    rest = ""
    for piece in _decoded(path):
        text = rest + piece
        cut = text.rfind("\n") + 1
        rest = text[cut:]
        if cut:
            yield text[:cut]
    if rest:
        yield rest


def _documents(path: Path) -> Iterator[str]:
    number = 0
    for piece in _lines(path):
        for line in piece.splitlines():
            number += 1
            if not line.strip():
                continue
            try:
                document = json.loads(line)
                text = document["text"] if isinstance(document, dict) else None
            except (ValueError, KeyError):
                text = None
            if not isinstance(text, str):
                says = f'line {number} is not {{"text": "..."}}'
                raise UserError(f"data.path: {path}: {says}; try one JSON object a line")
            yield text


def _encoder(tokenizer: str | None) -> tuple[Any, Any, list[int]]:
    """`(text → ids, dtype, ids between documents)`."""
    if tokenizer is None:
        return (lambda text: list(text.encode())), np.uint8, [10]
    if not Path(tokenizer).is_file():
        raise UserError(f"data.tokenizer: {tokenizer} does not exist; try bytes, or the path of a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("data.tokenizer: a tokenizer file needs a package; try pip install tokenizers") from None
    try:
        loaded = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the package raises bare Exception
        says = f"{tokenizer} is not a tokenizer.json: {error}"
        raise UserError(f"data.tokenizer: {says}; try a Hugging Face one") from None
    ends = [found for word in _END_OF_TEXT if (found := loaded.token_to_id(word)) is not None]
    dtype: Any = np.uint16 if loaded.get_vocab_size() <= 1 << 16 else np.uint32
    return (lambda text: loaded.encode(text, add_special_tokens=False).ids), dtype, ends[:1]
