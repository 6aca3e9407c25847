"""The tokenizer in a GGUF file, as the files that Hugging Face folders carry beside their weights.

Byte-level BPE with known words (`gguf_words`) and SentencePiece's BPE; any other kind is refused.
Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workers.models.errors import WeightsError
from workers.models.gguf.header import GgufHeader
from workers.models.gguf.pretokenizers import WORDS
from workers.models.gguf.sentencepiece import merges_of, parts

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # gguf's TokenType
# Hugging Face's name of a special token and the end of the file's key
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message: each stops generation


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and generation_config.json by name; nothing where the
    file has no tokens.

    Raises WeightsError for a kind that is not known here, or values that do not make a tokenizer.
    """
    values = header.values
    if values.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return {}
    ours = _Vocabulary(header)
    given = values.get("tokenizer.huggingface.json")
    made = given if isinstance(given, str) else json.dumps(ours.document(), ensure_ascii=False)
    try:
        made.encode()
    except UnicodeEncodeError:
        raise ours.refuse(
            "holds a token that is not UTF-8", "give the model's tokenizer.json beside it"
        ) from None
    configuration = {**ours.configuration(), **_templates(values)}
    return {
        "tokenizer.json": made,
        "tokenizer_config.json": json.dumps(configuration, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(ours.generation(), indent=2) + "\n",
    }


class _Vocabulary:
    def __init__(self, header: GgufHeader) -> None:
        self.where, self._values = str(header.path), header.values
        self.kind = str(self._values["tokenizer.ggml.model"])
        self.tokens: list[str] = self._list("tokens", str)
        count = len(self.tokens)
        self.types: list[int] = self._list("token_type", int, [_NORMAL] * count)
        if len(self.types) != count or not count:
            raise self.refuse(
                f"has {count} tokens and {len(self.types)} types of them", "fetch it again"
            )
        architecture = self._values.get("general.architecture")
        self.positions = self._values.get(f"{architecture}.context_length")

    def refuse(self, message: str, next_: str) -> WeightsError:
        return WeightsError(f"{self.where}: its tokenizer {message}; {next_}")

    def document(self) -> dict[str, Any]:
        """The tokenizer.json."""
        if self.kind == "gpt2":
            made = self._byte_level()
        elif self.kind == "llama":
            made = self._sentence_pieces()
        else:
            message = (
                f"is of the kind {self.kind!r}; gpt2 (byte-level BPE) and llama "
                "(SentencePiece's BPE) can be read"
            )
            raise self.refuse(message, "give the model's tokenizer.json beside it")
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            **made.pop("model"),
        }
        added = [
            {
                "id": number,
                "content": self.tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.types[number] != _USER,
            }
            for number in self._added()
        ]
        common = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
        return {**common, **made, "post_processor": self._around(), "model": model}

    def configuration(self) -> dict[str, Any]:
        named = {name: self._word(key) for name, key in _SPECIAL.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds("bos"),
            "add_eos_token": self._adds("eos"),
            **{name: word for name, word in named.items() if word is not None},
            **({"model_max_length": self.positions} if isinstance(self.positions, int) else {}),
        }

    def generation(self) -> dict[str, Any]:
        """What generation starts from and ends with, by id."""
        ends = list(dict.fromkeys(end for key in _ENDS if (end := self._id(key)) is not None))
        found: dict[str, Any] = {
            "bos_token_id": self._id("bos"),
            "pad_token_id": self._id("padding"),
        }
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        return {name: each for name, each in sorted(found.items()) if each is not None}

    def _byte_level(self) -> dict[str, Any]:
        name = self._values.get("tokenizer.ggml.pre", "default")
        words = WORDS.get(str(name))
        if words is None:
            message = (
                f"cuts text into words in a way called {name!r}; known ways are "
                f"{', '.join(sorted(WORDS))}"
            )
            raise self.refuse(
                message, "give the model's tokenizer.json beside it, or a newer conversion"
            )
        merges = [merge.split(" ", 1) for merge in self._list("merges", str)]
        if any(len(merge) != 2 for merge in merges):
            raise self.refuse("has a merge that is no pair", "fetch it again")
        return {
            "normalizer": words.normalizer,
            "pre_tokenizer": words.pre_tokenizer,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {"ignore_merges": words.whole_words, "vocab": self._ids(), "merges": merges},
        }

    def _sentence_pieces(self) -> dict[str, Any]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.refuse(
                f"has {len(self.tokens)} pieces and {len(scores)} scores", "fetch it again"
            )
        unknown = next(
            (word for word, of in zip(self.tokens, self.types, strict=True) if of == _UNKNOWN), None
        )
        usable = [of in (_NORMAL, _USER) for of in self.types]
        made = parts(
            self.tokens,
            unknown=unknown,
            byte_fallback=self.types.count(_BYTE) == 256,
            prefix=bool(self._values.get("tokenizer.ggml.add_space_prefix", True)),
        )
        made["model"] |= {"vocab": self._ids(), "merges": merges_of(self.tokens, scores, usable)}
        return made

    def _ids(self) -> dict[str, int]:
        """Without what only fills the table up to a round number of rows."""
        held = [number for number, of in enumerate(self.types) if of != _UNUSED]
        found = {self.tokens[number]: number for number in held}
        if len(found) != len(held):
            twice = next(
                self.tokens[number] for number in held if found[self.tokens[number]] != number
            )
            raise self.refuse(
                f"has the token {twice!r} twice", "give the model's tokenizer.json beside it"
            )
        return found

    def _added(self) -> list[int]:
        """Tokens that are found in a text before anything is cut, and those that only programs
        write.
        """
        named = {self._id(key) for key in (*_SPECIAL.values(), *_ENDS)}
        marked = (_UNKNOWN, _CONTROL, _USER)
        return [
            number
            for number, of in enumerate(self.types)
            if of in marked or (number in named and of == _NORMAL)
        ]

    def _around(self) -> dict[str, Any] | None:
        """What goes before and after a text, where the file says that something does."""
        first, last = (self._word(key) if self._adds(key) else None for key in ("bos", "eos"))
        if first is None and last is None:
            return None

        def one(name: str, kind: int) -> list[dict[str, Any]]:
            begin = [{"SpecialToken": {"id": first, "type_id": kind}}] if first is not None else []
            end = [{"SpecialToken": {"id": last, "type_id": kind}}] if last is not None else []
            return [*begin, {"Sequence": {"id": name, "type_id": kind}}, *end]

        told = {
            word: {"id": word, "ids": [self.tokens.index(word)], "tokens": [word]}
            for word in (first, last)
            if word
        }
        return {
            "type": "TemplateProcessing",
            "single": one("A", 0),
            "pair": [*one("A", 0), *one("B", 1)],
            "special_tokens": told,
        }

    def _adds(self, key: str) -> bool:
        told = self._values.get(f"tokenizer.ggml.add_{key}_token")
        if isinstance(told, bool):
            return told
        if key == "eos":
            return False
        words = WORDS.get(str(self._values.get("tokenizer.ggml.pre")))
        return self.kind == "llama" or (words is not None and words.adds_bos)

    def _id(self, key: str) -> int | None:
        number = self._values.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            return None
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            raise self.refuse(
                f"has {key}_token_id {number!r} and {len(self.tokens)} tokens", "fetch it again"
            )
        return number

    def _word(self, key: str) -> str | None:
        number = self._id(key)
        return None if number is None else self.tokens[number]

    def _list(self, key: str, of: type, default: list[Any] | None = None) -> list[Any]:
        found = self._values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, list) or not all(isinstance(each, of) for each in found):
            raise self.refuse(
                f"has no {key}", "fetch it again, or give the model's tokenizer.json beside it"
            )
        return found


def _templates(values: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template`: one, or several by name, as tokenizer_config.json holds them."""
    one = values.get("tokenizer.chat_template")
    listed = values.get("tokenizer.chat_templates")
    more = listed if isinstance(listed, list) else []
    named = {str(name): values.get(f"tokenizer.chat_template.{name}") for name in more}
    several = {**({"default": one} if isinstance(one, str) else {}), **named}
    told = [
        {"name": name, "template": each} for name, each in several.items() if isinstance(each, str)
    ]
    if len(told) > 1:
        return {"chat_template": told}
    return {"chat_template": told[0]["template"]} if told else {}
