"""SentencePiece's BPE (arXiv 1808.06226) as sections of a tokenizer.json.

Merges are recovered from the scores of the pieces. Does not depend on special tokens or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SPACE = "▁"


def bpe_merges(
    pieces: Sequence[str], scores: Sequence[float], usable: Sequence[bool]
) -> list[list[str]]:
    """Merges `[left, right]` in order of precedence.

    SentencePiece joins the neighbors that form the piece with the highest score, so every split of
    a piece is a merge with the rank of that piece. Among splits of one piece the longest left part
    comes first, as in the tokenizer.json of Llama and Mistral.
    """
    ids = {piece: number for number, piece in enumerate(pieces) if usable[number]}
    merges: list[tuple[float, int, int, list[str]]] = []
    for piece, number in ids.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                merges.append((-scores[number], -at, number, [left, right]))
    return [merge[-1] for merge in sorted(merges)]


def parts(
    pieces: Sequence[str], *, unknown: str | None, byte_fallback: bool, prefix: bool
) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder, and the model without vocabulary and merges.

    `prefix`: whether a space is added before a text, and removed when decoding.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
        },
    }
