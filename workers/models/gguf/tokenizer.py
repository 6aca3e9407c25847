"""The tokenizer in a GGUF file, converted to Hugging Face's tokenizer files.

Byte-level BPE with a known pre-tokenizer (`pretokenizers`) and SentencePiece's BPE; other kinds are
refused. Does not depend on torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workers.models.errors import WeightsError
from workers.models.gguf.header import GgufHeader
from workers.models.gguf.pretokenizers import PRETOKENIZERS
from workers.models.gguf.sentencepiece import bpe_merges, parts

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # gguf's TokenType
# Hugging Face's name of a special token → suffix of the GGUF key
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message: each stops generation


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and generation_config.json; empty without tokens.

    Raises WeightsError for an unknown kind and for invalid values.
    """
    values = header.values
    if values.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return {}
    vocabulary = _Vocabulary(header)
    stored = values.get("tokenizer.huggingface.json")
    document = (
        stored if isinstance(stored, str) else json.dumps(vocabulary.document(), ensure_ascii=False)
    )
    try:
        document.encode()
    except UnicodeEncodeError:
        raise vocabulary.error(
            "has a token that is not UTF-8", "Put the model's tokenizer.json next to it."
        ) from None
    configuration = {**vocabulary.configuration(), **_templates(values)}
    return {
        "tokenizer.json": document,
        "tokenizer_config.json": json.dumps(configuration, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(vocabulary.generation(), indent=2) + "\n",
    }


class _Vocabulary:
    def __init__(self, header: GgufHeader) -> None:
        self.where, self._values = str(header.path), header.values
        self.kind = str(self._values["tokenizer.ggml.model"])
        self.tokens: list[str] = self._list("tokens", str)
        count = len(self.tokens)
        self.types: list[int] = self._list("token_type", int, [_NORMAL] * count)
        if len(self.types) != count or not count:
            raise self.error(
                f"has {count} tokens and {len(self.types)} types of them", "Fetch it again."
            )
        architecture = self._values.get("general.architecture")
        self.positions = self._values.get(f"{architecture}.context_length")

    def error(self, message: str, hint: str) -> WeightsError:
        """The exception for this tokenizer."""
        return WeightsError(f"{self.where}: its tokenizer {message}. {hint}")

    def document(self) -> dict[str, Any]:
        """The content of tokenizer.json. Raises WeightsError for an unsupported tokenizer."""
        if self.kind == "gpt2":
            made = self._byte_level()
        elif self.kind == "llama":
            made = self._sentence_pieces()
        else:
            message = (
                f"is of the kind {self.kind!r}; gpt2 (byte-level BPE) and llama "
                "(SentencePiece's BPE) can be read"
            )
            raise self.error(message, "Put the model's tokenizer.json next to it.")
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
        """The content of tokenizer_config.json."""
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
        """The content of generation_config.json: ids of start, end and padding."""
        ends = list(dict.fromkeys(end for key in _ENDS if (end := self._id(key)) is not None))
        ids: dict[str, Any] = {
            "bos_token_id": self._id("bos"),
            "pad_token_id": self._id("padding"),
        }
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        return {name: value for name, value in sorted(ids.items()) if value is not None}

    def _byte_level(self) -> dict[str, Any]:
        name = self._values.get("tokenizer.ggml.pre", "default")
        pretokenizer = PRETOKENIZERS.get(str(name))
        if pretokenizer is None:
            message = (
                f"uses the pre-tokenizer {name!r}; known are {', '.join(sorted(PRETOKENIZERS))}"
            )
            raise self.error(
                message, "Put the model's tokenizer.json next to it, or use a newer conversion."
            )
        merges = [merge.split(" ", 1) for merge in self._list("merges", str)]
        if any(len(merge) != 2 for merge in merges):
            raise self.error("has a merge that is not a pair", "Fetch it again.")
        return {
            "normalizer": pretokenizer.normalizer,
            "pre_tokenizer": pretokenizer.pre_tokenizer,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "ignore_merges": pretokenizer.ignore_merges,
                "vocab": self._ids(),
                "merges": merges,
            },
        }

    def _sentence_pieces(self) -> dict[str, Any]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.error(
                f"has {len(self.tokens)} pieces and {len(scores)} scores", "Fetch it again."
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
        made["model"] |= {"vocab": self._ids(), "merges": bpe_merges(self.tokens, scores, usable)}
        return made

    def _ids(self) -> dict[str, int]:
        """Ids of all tokens except the unused ones that pad the table."""
        used = [number for number, of in enumerate(self.types) if of != _UNUSED]
        ids = {self.tokens[number]: number for number in used}
        if len(ids) != len(used):
            twice = next(
                self.tokens[number] for number in used if ids[self.tokens[number]] != number
            )
            raise self.error(
                f"has the token {twice!r} twice", "Put the model's tokenizer.json next to it."
            )
        return ids

    def _added(self) -> list[int]:
        """Tokens that are matched before pre-tokenization, and control tokens."""
        named = {self._id(key) for key in (*_SPECIAL.values(), *_ENDS)}
        marked = (_UNKNOWN, _CONTROL, _USER)
        return [
            number
            for number, of in enumerate(self.types)
            if of in marked or (number in named and of == _NORMAL)
        ]

    def _around(self) -> dict[str, Any] | None:
        """The post-processor that adds tokens around a text, if the file requires it."""
        first, last = (self._word(key) if self._adds(key) else None for key in ("bos", "eos"))
        if first is None and last is None:
            return None

        def sequence(name: str, kind: int) -> list[dict[str, Any]]:
            begin = [{"SpecialToken": {"id": first, "type_id": kind}}] if first is not None else []
            end = [{"SpecialToken": {"id": last, "type_id": kind}}] if last is not None else []
            return [*begin, {"Sequence": {"id": name, "type_id": kind}}, *end]

        special = {
            word: {"id": word, "ids": [self.tokens.index(word)], "tokens": [word]}
            for word in (first, last)
            if word
        }
        return {
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": [*sequence("A", 0), *sequence("B", 1)],
            "special_tokens": special,
        }

    def _adds(self, key: str) -> bool:
        adds = self._values.get(f"tokenizer.ggml.add_{key}_token")
        if isinstance(adds, bool):
            return adds
        if key == "eos":
            return False
        pretokenizer = PRETOKENIZERS.get(str(self._values.get("tokenizer.ggml.pre")))
        return self.kind == "llama" or (pretokenizer is not None and pretokenizer.adds_bos)

    def _id(self, key: str) -> int | None:
        number = self._values.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            return None
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            raise self.error(
                f"has {key}_token_id {number!r} and {len(self.tokens)} tokens", "Fetch it again."
            )
        return number

    def _word(self, key: str) -> str | None:
        number = self._id(key)
        return None if number is None else self.tokens[number]

    def _list(self, key: str, of: type, default: list[Any] | None = None) -> list[Any]:
        values = self._values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(values, list) or not all(isinstance(value, of) for value in values):
            raise self.error(
                f"has no {key}", "Fetch it again, or put the model's tokenizer.json next to it."
            )
        return values


def _templates(values: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template` of tokenizer_config.json: one, or several by name."""
    one = values.get("tokenizer.chat_template")
    listed = values.get("tokenizer.chat_templates")
    more = listed if isinstance(listed, list) else []
    named = {str(name): values.get(f"tokenizer.chat_template.{name}") for name in more}
    several = {**({"default": one} if isinstance(one, str) else {}), **named}
    templates = [
        {"name": name, "template": text} for name, text in several.items() if isinstance(text, str)
    ]
    if len(templates) > 1:
        return {"chat_template": templates}
    return {"chat_template": templates[0]["template"]} if templates else {}
