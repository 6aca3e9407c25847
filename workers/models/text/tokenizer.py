"""A model's own tokenizer: text to token ids and back, special tokens, chat template.

Imports the package `tokenizers` when one is opened. Does not depend on torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError
from workers.models.text.assets import CONFIGURATION, GENERATION, TEMPLATE, TOKENIZER, read_assets
from workers.models.text.chat_prompt import Messages, chat_text, encode_chat


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A loaded tokenizer.

    `vocab` is the largest id plus one; `ends` are the ids at which generation stops, that of a text
    first. `special` are the texts of bos, eos, unk and pad by the names that templates use.
    """

    where: str
    vocab: int
    bos: int | None
    ends: tuple[int, ...]
    chat_template: str | None
    special: Mapping[str, str] = field(default_factory=dict)
    _loaded: Any = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; with `special` including the tokens that the model adds around a text.

        Special tokens inside the text are recognized.
        """
        ids: list[int] = self._loaded.encode(text, add_special_tokens=special).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without the tokens around a text, and the characters of each as (start, stop)."""
        encoding = self._loaded.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def control_tokens(self) -> dict[str, int]:
        """Texts and ids of the special tokens, which delimit texts and turns."""
        return {
            token.content: number
            for number, token in self._loaded.get_added_tokens_decoder().items()
            if token.special
        }

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text, with special tokens only if `special`; invalid UTF-8 becomes U+FFFD."""
        text: str = self._loaded.decode(list(ids), skip_special_tokens=not special)
        return text

    def ids(self) -> dict[str, int]:
        """Ids of all tokens, including special ones."""
        ids: dict[str, int] = self._loaded.get_vocab(with_added_tokens=True)
        return ids

    def as_json(self) -> str:
        """The tokenizer.json, as the package `tokenizers` writes it."""
        document: str = self._loaded.to_str()
        return document

    def chat(self, messages: Messages, *, answer: bool = True, tools: Sequence[Any] = ()) -> str:
        """The conversation in the model's format, with `answer` up to the start of its answer.

        `messages` are `{role, content}`. `encode_chat` returns its ids. Raises WeightsError
        if there is no template, or it refuses the messages.
        """
        template, where = self._template(), self.where
        return chat_text(template, self.special, messages, tools=tools, answer=answer, where=where)

    def encode_chat(self, messages: Messages, *, tools: Sequence[Any] = ()) -> list[int]:
        """Ids of the conversation up to the start of the next answer. Raises as `chat`."""
        return encode_chat(
            self._template(),
            self.special,
            messages,
            encode=lambda text: self.encode(text, special=False),
            tools=tools,
            where=self.where,
        )

    def _template(self) -> str:
        if self.chat_template is None:
            raise WeightsError(
                f"{self.where} has no chat template; give an instruction-tuned model, or plain "
                "prompts"
            )
        return self.chat_template


def open_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of weights: a Hugging Face folder, a checkpoint, a fetched model or a .gguf.

    Raises WeightsError if it is missing or invalid.
    """
    files = read_assets(path)
    if TOKENIZER not in files:
        raise WeightsError(
            f"{path} has no {TOKENIZER} next to its weights; put the model's own there"
        )
    loaded = _load(files[TOKENIZER], f"{path}: {TOKENIZER}")
    settings = {name: _object(files, name, path) for name in (CONFIGURATION, GENERATION)}
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text_of(settings[CONFIGURATION].get(name))) is not None
    }
    ids = {name: loaded.token_to_id(text) for name, text in special.items()}
    ends = settings[GENERATION].get("eos_token_id", ids.get("eos_token"))
    begin = settings[GENERATION].get("bos_token_id", ids.get("bos_token"))
    template = (
        files[TEMPLATE].decode()
        if TEMPLATE in files
        else _template(settings[CONFIGURATION].get("chat_template"))
    )
    return TextTokenizer(
        where=str(path),
        vocab=max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos=begin if isinstance(begin, int) else None,
        ends=tuple(
            end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)
        ),
        chat_template=template,
        special=special,
        _loaded=loaded,
    )


def _load(data: bytes, what: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise WeightsError(
            f"{what} needs the package tokenizers. Run pip install tokenizers."
        ) from None
    try:
        return tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the package raises bare Exception
        raise WeightsError(f"{what} cannot be read: {str(error)[:200]}; fetch it again") from None


def _object(files: Mapping[str, bytes], name: str, path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise WeightsError(
            f"{path}: {name} is not JSON: {str(error)[:80]}; fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: {name} is not a JSON object; fetch it again")
    return value


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is a string or an object with it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _template(value: Any) -> str | None:
    """The template; of several, the one named default."""
    if isinstance(value, list):
        named = {
            item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)
        }
        value = named.get("default")
    return value if isinstance(value, str) else None
