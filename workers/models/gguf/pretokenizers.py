"""How byte-level vocabularies cut text into words before they merge: a tokenizer.json's parts by
tokenizer.ggml.pre.

What stands here are the expressions that the models were published with. Does not know vocabularies
or merges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class Words:
    """`whole_words`: a word that is a token is taken as it is, whatever merges say.

    `adds_bos` where no key says.
    """

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    whole_words: bool = False
    adds_bos: bool = False
    names: tuple[str, ...] = field(default=())


def _bytes(*, splits: bool) -> dict[str, Any]:
    # with `splits`, GPT-2's own expression cuts
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splits,
    }


def _cut(*expressions: str) -> dict[str, Any]:
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*cuts, _bytes(splits=False)]}


_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _bytes(splits=True)],
}
_KINDS = (
    Words(_bytes(splits=True), names=("gpt-2", "gpt2", "phi-2", "olmo", "exaone4")),
    Words(_DIGITS, names=("smollm", "starcoder", "refact", "codeshell")),
    Words(
        _cut(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
        whole_words=True,
        adds_bos=True,
        names=("llama-bpe", "llama3", "llama-v3", "falcon3"),
    ),
    Words(
        _cut(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
        names=("smaug-bpe", "dbrx"),
    ),
    Words(
        _cut(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"),
        normalizer={"type": "NFC"},
        names=("qwen2", "deepseek-r1-qwen", "megrez"),
    ),
    Words(
        _cut(
            rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        whole_words=True,
        adds_bos=True,
        names=("tekken",),
    ),
)
WORDS: dict[str, Words] = {name: kind for kind in _KINDS for name in kind.names}
