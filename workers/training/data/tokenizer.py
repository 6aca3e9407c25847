"""Text to token ids: raw bytes, a tokenizer.json, or a byte-level BPE trained here. And whether one
suits a model.

Does not know files of text. Loads the package `tokenizers` only where a file is read or trained.
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
from workers.runtime.exits import UserError

NAME = TOKENIZER
END_OF_TEXT = "<|endoftext|>"
# what ends a document, by the names that published tokenizers give it
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[SEP]")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`encode` makes ids of several texts at once, `decode` a text of ids: whatever ids a model may
    write, what is no
    character becomes U+FFFD. `separator` is put after each document.

    `vocab` is one more than the largest id; `digest` tells one tokenizer from another, bytes being
    "bytes".
    """

    encode: Callable[[Sequence[str]], list[list[int]]]
    vocab: int
    separator: tuple[int, ...]
    digest: str
    decode: Callable[[Sequence[int]], str]

    @property
    def document_end(self) -> int | None:
        """The id that only ever ends a document; a byte may stand anywhere."""
        return self.separator[0] if self.separator and self.digest != "bytes" else None


def _bytes_decoded(ids: Sequence[int]) -> str:
    # 255 is in no UTF-8
    return bytes(min(number, 255) for number in ids).decode(errors="replace")


BYTES = Tokenizer(
    lambda texts: [list(text.encode()) for text in texts],
    256,
    (10,),
    "bytes",
    decode=_bytes_decoded,
)


def load_tokenizer(path: Path, *, vocab: int) -> Tokenizer:
    """A tokenizer.json, or a folder with one. Raises UserError where it is none or has ids beyond
    `vocab`.

    Text that spells a special token is read as text, so that data cannot end documents or open
    turns.
    """
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"data.tokenizer: {file} does not exist; try bytes, or the path of a {NAME}"
        )
    loaded = _read(file)
    loaded.encode_special_tokens = True
    ids = loaded.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest >= vocab:
        message = f"{file} has token ids up to {largest}, the model's vocabulary has {vocab}"
        raise UserError(
            f"data.tokenizer: {message}; try the tokenizer of this model, or vocab {largest + 1} or "
            "more"
        )
    ends = [ids[word] for word in _ENDS if word in ids]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [
            found.ids for found in loaded.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(ids: Sequence[int]) -> str:
        return str(
            loaded.decode([number for number in ids if number <= largest], skip_special_tokens=True)
        )

    return Tokenizer(
        encode, largest + 1, tuple(ends[:1]), hashlib.sha256(file.read_bytes()).hexdigest(), decode
    )


def train_bpe(texts: Iterable[str], *, vocab: int, path: Path) -> None:
    """Train a byte-level BPE (GPT-2's way: arXiv 1508.07909 on bytes) and write it to `path`, whole
    or not at all.

    The same text gives the same file. Fewer than `vocab` tokens come out where the text has too few
    pairs.
    """
    tokenizers = _package()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    made.save(str(beside))
    os.replace(beside, path)


def check_same(ours: Path, weights: Path) -> None:
    """Raises UserError where weights at `weights` come with a tokenizer that gives text other ids
    than `ours`.

    It lies beside them, or inside a .gguf file; weights without one, or with one that cannot be
    read here, are taken as
    they are.
    """
    mine = ours / NAME if ours.is_dir() else ours
    try:
        theirs = read_assets(weights).get(NAME)
    except WeightsError:
        theirs = None
    if theirs is None or mine.read_bytes() == theirs:
        return
    told, want = _read(mine).get_vocab(with_added_tokens=True), _parsed(theirs, weights)
    other = sorted(word for word, number in told.items() if want.get(word) != number)
    if other:
        word = other[0]
        message = (
            f"{len(other)} of {len(told)} tokens have other ids than in the {NAME} of "
            f"{weights}, as {word!r}"
        )
        raise UserError(
            f"data.tokenizer: {mine}: {message}: {told[word]}, there {want.get(word)}; try no "
            "tokenizer: "
            "then the weights' own is taken"
        )


def _parsed(document: bytes, weights: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = (
            _package().Tokenizer.from_str(document.decode()).get_vocab(with_added_tokens=True)
        )
    except UserError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise UserError(
            f"data.tokenizer: the {NAME} of {weights} cannot be read: {error}; fetch it again"
        ) from None
    return found


def _read(file: Path) -> Any:
    try:
        return _package().Tokenizer.from_file(str(file))
    except UserError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise UserError(
            f"data.tokenizer: {file} is not a {NAME}: {error}; try a Hugging Face one"
        ) from None


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer: a tokenizer file needs a package; try pip install tokenizers"
        ) from None
    return tokenizers
