"""Pre-tokenizers of byte-level BPE vocabularies by `tokenizer.ggml.pre`, for a tokenizer.json.

The expressions are those that the models were published with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """A pre-tokenizer and its defaults.

    `ignore_merges`: a word that is a token is used without merging. `adds_bos` is the default of
    the file's key.
    """

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False
    names: tuple[str, ...] = field(default=())


def _bytes(*, splits: bool) -> dict[str, Any]:
    # with `splits`, GPT-2's expression splits the text
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splits,
    }


def _split(*expressions: str) -> dict[str, Any]:
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _bytes(splits=False)]}


_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _bytes(splits=True)],
}
_KINDS = (
    Pretokenizer(_bytes(splits=True), names=("gpt-2", "gpt2", "phi-2", "olmo", "exaone4")),
    Pretokenizer(_DIGITS, names=("smollm", "starcoder", "refact", "codeshell")),
    Pretokenizer(
        _split(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
        ignore_merges=True,
        adds_bos=True,
        names=("llama-bpe", "llama3", "llama-v3", "falcon3"),
    ),
    Pretokenizer(
        _split(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
        names=("smaug-bpe", "dbrx"),
    ),
    Pretokenizer(
        _split(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"),
        normalizer={"type": "NFC"},
        names=("qwen2", "deepseek-r1-qwen", "megrez"),
    ),
    Pretokenizer(
        _split(
            rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        ignore_merges=True,
        adds_bos=True,
        names=("tekken",),
    ),
)
PRETOKENIZERS: dict[str, Pretokenizer] = {name: kind for kind in _KINDS for name in kind.names}
