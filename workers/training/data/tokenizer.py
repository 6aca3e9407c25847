"""Text to token ids: raw bytes, a tokenizer.json or a trained byte-level BPE, checked for a model.

Does not depend on text files. Imports the package `tokenizers` only when a file is read or trained.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError
from workers.models.text.assets import TOKENIZER, read_assets
from workers.runtime.exit_codes import UserError

NAME = TOKENIZER
END_OF_TEXT = "<|endoftext|>"
# the end-of-document tokens of published tokenizers
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[SEP]")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`encode` turns texts into ids, `decode` ids into text; ids that are not text become U+FFFD.

    `separator` follows each document. `vocab` is the largest id plus one; `digest` identifies the
    tokenizer, "bytes" for raw bytes.
    """

    encode: Callable[[Sequence[str]], list[list[int]]]
    vocab: int
    separator: tuple[int, ...]
    digest: str
    decode: Callable[[Sequence[int]], str]

    @property
    def document_end(self) -> int | None:
        """The id that only ends documents; None for bytes, which may occur anywhere."""
        return self.separator[0] if self.separator and self.digest != "bytes" else None


def _bytes_decoded(ids: Sequence[int]) -> str:
    # 255 never occurs in UTF-8
    return bytes(min(number, 255) for number in ids).decode(errors="replace")


BYTES = Tokenizer(
    lambda texts: [list(text.encode()) for text in texts],
    256,
    (10,),
    "bytes",
    decode=_bytes_decoded,
)


def load_tokenizer(path: Path, *, vocab: int) -> Tokenizer:
    """Load a tokenizer.json or a folder with one. Raises UserError if missing or with ids >=
    `vocab`.

    Special tokens spelled in text are read as text, so that data cannot end documents or open
    turns.
    """
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"data.tokenizer: {file} does not exist. Use bytes, or the path of a {NAME}."
        )
    loaded = _load_tokenizer_file(file)
    loaded.encode_special_tokens = True
    ids = loaded.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest >= vocab:
        message = f"{file} has token ids up to {largest}, the model's vocabulary has {vocab}"
        raise UserError(
            f"data.tokenizer: {message}. Use the model's tokenizer, or vocab {largest + 1} or more."
        )
    end_ids = [ids[token] for token in _ENDS if token in ids]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in loaded.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(ids: Sequence[int]) -> str:
        return str(
            loaded.decode([number for number in ids if number <= largest], skip_special_tokens=True)
        )

    return Tokenizer(
        encode,
        largest + 1,
        tuple(end_ids[:1]),
        hashlib.sha256(file.read_bytes()).hexdigest(),
        decode,
    )


def train_bpe(texts: Iterable[str], *, vocab: int, path: Path) -> None:
    """Train a byte-level BPE (as GPT-2: arXiv 1508.07909 on bytes) and write it to `path`
    atomically.

    Deterministic for the same text. Gives fewer than `vocab` tokens if the text has too few pairs.
    """
    tokenizers = _import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    tokenizer.save(str(partial))
    os.replace(partial, path)


def check_same(ours: Path, weights: Path) -> None:
    """Raises UserError if the tokenizer of `weights` gives text other ids than `ours`.

    The weights' tokenizer is next to them or inside a .gguf file. Weights without one, or with one
    that cannot be read here, are accepted.
    """
    mine = ours / NAME if ours.is_dir() else ours
    try:
        theirs = read_assets(weights).get(NAME)
    except WeightsError:
        theirs = None
    if theirs is None or mine.read_bytes() == theirs:
        return
    own, expected = (
        _load_tokenizer_file(mine).get_vocab(with_added_tokens=True),
        _parse_vocab(theirs, weights),
    )
    other = sorted(token for token, number in own.items() if expected.get(token) != number)
    if other:
        token = other[0]
        message = (
            f"{len(other)} of {len(own)} tokens have other ids in the {NAME} of "
            f"{weights}, as {token!r}"
        )
        raise UserError(
            f"data.tokenizer: {mine}: {message}: {own[token]}, there {expected.get(token)}. Use no "
            "tokenizer: then the weights' tokenizer is used."
        )


def _parse_vocab(document: bytes, weights: Path) -> dict[str, int]:
    try:
        encoding: dict[str, int] = (
            _import_tokenizers()
            .Tokenizer.from_str(document.decode())
            .get_vocab(with_added_tokens=True)
        )
    except UserError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise UserError(
            f"data.tokenizer: the {NAME} of {weights} cannot be read: {error}; fetch it again"
        ) from None
    return encoding


def _load_tokenizer_file(file: Path) -> Any:
    try:
        return _import_tokenizers().Tokenizer.from_file(str(file))
    except UserError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise UserError(
            f"data.tokenizer: {file} is not a {NAME}: {error}. Use a Hugging Face one."
        ) from None


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer: the package tokenizers is missing. Run pip install tokenizers."
        ) from None
    return tokenizers
