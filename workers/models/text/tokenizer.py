"""Text to token ids and back as a model's own tokenizer does it, with its special tokens and chat
template.

Loads the package `tokenizers` when one is opened, and torch never.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError
from workers.models.text.assets import CONFIGURATION, GENERATION, TEMPLATE, TOKENIZER, belongings
from workers.models.text.chat_templates import render


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """`vocab` is one more than the largest id; `ends` are the ids at which generation stops, the
    first of a text.

    `special` are the texts of bos, eos, unk and pad, as templates name them.
    """

    where: str
    vocab: int
    bos: int | None
    ends: tuple[int, ...]
    chat_template: str | None
    special: Mapping[str, str] = field(default_factory=dict)
    _loaded: Any = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids; with `special`, what the model puts around a text is put around it.

        Special tokens in it are found.
        """
        found: list[int] = self._loaded.encode(text, add_special_tokens=special).ids
        return found

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text; without `special`, special tokens are left out.

        Bytes that are no UTF-8 become U+FFFD.
        """
        found: str = self._loaded.decode(list(ids), skip_special_tokens=not special)
        return found

    def ids(self) -> dict[str, int]:
        """Of every token, special ones too."""
        found: dict[str, int] = self._loaded.get_vocab(with_added_tokens=True)
        return found

    def as_json(self) -> str:
        """The whole tokenizer, as the package `tokenizers` writes it."""
        told: str = self._loaded.to_str()
        return told

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **more: Any
    ) -> str:
        """The conversation as the model was taught to read it; with `answer`, up to where its
        answer begins.

        `messages` are `{role, content}`. Encode the text without `special`: the template has it.
        Raises WeightsError
        where there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise WeightsError(
                f"{self.where} has no chat template; give an instruction-tuned model, or plain "
                "prompts"
            )
        names = {**self.special, **more, "messages": messages, "add_generation_prompt": answer}
        return render(self.chat_template, names, where=self.where)


def open_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of weights at `path`: a Hugging Face folder, a checkpoint's or a fetched
    model's, or a .gguf file.

    Raises WeightsError where there is none, or it cannot be read.
    """
    files = belongings(path)
    if TOKENIZER not in files:
        raise WeightsError(
            f"{path} has no {TOKENIZER} beside its weights; put the model's own there"
        )
    loaded = _load(files[TOKENIZER], f"{path}: {TOKENIZER}")
    told = {name: _object(files, name, path) for name in (CONFIGURATION, GENERATION)}
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text_of(told[CONFIGURATION].get(name))) is not None
    }
    ids = {name: loaded.token_to_id(text) for name, text in special.items()}
    ends = told[GENERATION].get("eos_token_id", ids.get("eos_token"))
    begin = told[GENERATION].get("bos_token_id", ids.get("bos_token"))
    template = (
        files[TEMPLATE].decode()
        if TEMPLATE in files
        else _template(told[CONFIGURATION].get("chat_template"))
    )
    return TextTokenizer(
        where=str(path),
        vocab=max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos=begin if isinstance(begin, int) else None,
        ends=tuple(
            each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int)
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
            f"{what} needs the package tokenizers; try pip install tokenizers"
        ) from None
    try:
        return tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the package raises bare Exception
        raise WeightsError(f"{what} cannot be read: {str(error)[:200]}; fetch it again") from None


def _object(files: Mapping[str, bytes], name: str, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise WeightsError(
            f"{path}: {name} is not JSON: {str(error)[:80]}; fetch it again"
        ) from None
    if not isinstance(found, dict):
        raise WeightsError(f"{path}: {name} holds no JSON object; fetch it again")
    return found


def _text_of(given: Any) -> str | None:
    """A special token is its text, or an object with it."""
    text = given.get("content") if isinstance(given, Mapping) else given
    return text if isinstance(text, str) else None


def _template(given: Any) -> str | None:
    """Of several by name the one called default."""
    if isinstance(given, list):
        named = {
            each.get("name"): each.get("template") for each in given if isinstance(each, Mapping)
        }
        given = named.get("default")
    return given if isinstance(given, str) else None
