"""Text to token ids and back for whatever a model reads: its tokenizer, raw bytes, or nothing but
ids.

Knows files beside weights and loads no torch; what a request does with text is `stops`'.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workers.models.errors import WeightsError
from workers.models.text.assets import GENERATION, TOKENIZER, belongings, reads_bytes
from workers.models.text.tokenizer import open_tokenizer
from workers.models.weights.locations import place


class Words(Protocol):
    """What `workers.models.text.tokenizer.TextTokenizer` is."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str: ...


class ByteWords:
    """A byte is a token; there are no special ones."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        raise WeightsError(
            "a model of raw bytes has no chat template; give a prompt in place of messages"
        )


def open_words(path: Path) -> tuple[Words | None, tuple[int, ...]]:
    """Of weights at `path`: what reads and writes text, None where only ids are known, and the ids
    that end an answer.

    Raises WeightsError for a tokenizer that is there and cannot be read.
    """
    files = belongings(path)
    if TOKENIZER in files:
        tokenizer = open_tokenizer(path)
        return tokenizer, tokenizer.ends or _ends(path, files)
    return ByteWords() if reads_bytes(path) else None, _ends(path, files)


def _ends(path: Path, files: Mapping[str, bytes]) -> tuple[int, ...]:
    config = place(path) / "config.json"
    for name, data in ((GENERATION, files.get(GENERATION)), (config.name, _bytes(config))):
        try:
            told = json.loads(data or b"{}")
        except ValueError as error:
            raise WeightsError(
                f"{path}: {name} is not JSON: {str(error)[:80]}; fetch it again"
            ) from None
        given = told.get("eos_token_id") if isinstance(told, dict) else None
        found = tuple(
            each
            for each in (given if isinstance(given, list) else [given])
            if isinstance(each, int)
        )
        if found:
            return found
    return ()


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
