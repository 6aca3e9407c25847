"""Text to token ids and back for any model: its tokenizer, raw bytes, or none (ids only).

Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workers.models.errors import WeightsError
from workers.models.text.assets import (
    GENERATION,
    TEMPLATE,
    TOKENIZER,
    read_assets,
    reads_bytes,
    weights_folder,
)
from workers.models.text.chat_prompt import Messages, chat_text, encode_chat
from workers.models.text.default_template import BYTES_END, BYTES_END_ID
from workers.models.text.tokenizer import open_tokenizer


class Tokenizer(Protocol):
    """The interface of `workers.models.text.tokenizer.TextTokenizer`."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text."""
        ...

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids."""
        ...

    def chat(self, messages: Messages, *, answer: bool = True, tools: Sequence[Any] = ()) -> str:
        """The text of messages, by the chat template."""
        ...

    def encode_chat(self, messages: Messages, *, tools: Sequence[Any] = ()) -> list[int]:
        """The ids of messages up to the start of the next answer, by the chat template."""
        ...


class ByteTokenizer:
    """Each byte is a token; there are no special tokens. Fine-tuned weights have a template."""

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text."""
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids, without the end token of fine-tuned weights unless `special`."""
        ends = {BYTES_END_ID} if self.chat_template is not None and not special else set()
        text = (token for token in ids if token < 256 and token not in ends)
        return bytes(text).decode(errors="replace")

    def chat(self, messages: Messages, *, answer: bool = True, tools: Sequence[Any] = ()) -> str:
        """The text of messages, by the chat template."""
        special = {"eos_token": BYTES_END}
        return chat_text(
            self._template(), special, messages, tools=tools, answer=answer, where="bytes"
        )

    def encode_chat(self, messages: Messages, *, tools: Sequence[Any] = ()) -> list[int]:
        """The ids of messages up to the start of the next answer, by the chat template."""
        special = {"eos_token": BYTES_END}
        return encode_chat(
            self._template(), special, messages, encode=self.encode, tools=tools, where="bytes"
        )

    def _template(self) -> str:
        if self.chat_template is None:
            raise WeightsError(
                "a model of raw bytes has no chat template; give a prompt instead of messages"
            )
        return self.chat_template


def load_tokenizer(path: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of the weights at `path` (None: ids only) and the stop token ids.

    Raises WeightsError for a tokenizer that cannot be read.
    """
    files = read_assets(path)
    if TOKENIZER in files:
        tokenizer = open_tokenizer(path)
        return tokenizer, tokenizer.ends or _stop_token_ids(path, files)
    template = files[TEMPLATE].decode() if TEMPLATE in files else None
    bytes_ = ByteTokenizer(template) if reads_bytes(path) else None
    return bytes_, _stop_token_ids(path, files)


def _stop_token_ids(path: Path, files: Mapping[str, bytes]) -> tuple[int, ...]:
    config = weights_folder(path) / "config.json"
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
