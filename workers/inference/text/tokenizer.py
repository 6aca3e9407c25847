"""Text to token ids and back for any model: its tokenizer, raw bytes, or none (ids only).

Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workers.models.errors import WeightsError
from workers.models.text.assets import GENERATION, TOKENIZER, read_assets, reads_bytes
from workers.models.text.tokenizer import open_tokenizer
from workers.models.weights.locations import resolve_weights_path


class Tokenizer(Protocol):
    """The interface of `workers.models.text.tokenizer.TextTokenizer`."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text."""
        ...

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The prompt of messages, by the chat template."""
        ...


class ByteTokenizer:
    """Each byte is a token; there are no special tokens."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text."""
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The prompt of messages, by the chat template."""
        raise WeightsError(
            "a model of raw bytes has no chat template; give a prompt instead of messages"
        )


def load_tokenizer(path: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of the weights at `path` (None: ids only) and the stop token ids.

    Raises WeightsError for a tokenizer that cannot be read.
    """
    files = read_assets(path)
    if TOKENIZER in files:
        tokenizer = open_tokenizer(path)
        return tokenizer, tokenizer.ends or _stop_token_ids(path, files)
    return ByteTokenizer() if reads_bytes(path) else None, _stop_token_ids(path, files)


def _stop_token_ids(path: Path, files: Mapping[str, bytes]) -> tuple[int, ...]:
    config = resolve_weights_path(path) / "config.json"
    for name, data in ((GENERATION, files.get(GENERATION)), (config.name, _bytes(config))):
        try:
            settings = json.loads(data or b"{}")
        except ValueError as error:
            raise WeightsError(
                f"{path}: {name} is not JSON: {str(error)[:80]}; fetch it again"
            ) from None
        value = settings.get("eos_token_id") if isinstance(settings, dict) else None
        values = value if isinstance(value, list) else [value]
        ids = tuple(token for token in values if isinstance(token, int))
        if ids:
            return ids
    return ()


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
