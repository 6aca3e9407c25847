"""SentencePiece's BPE (arXiv 1808.06226) as a tokenizer.json's parts: merges are recovered from the
pieces' scores.

Knows pieces and scores; does not know special tokens or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SPACE = "▁"


def merges_of(
    pieces: Sequence[str], scores: Sequence[float], usable: Sequence[bool]
) -> list[list[str]]:
    """Pairs in the order in which they are to be merged, as `[left, right]`.

    SentencePiece joins the neighbours that make the piece of the highest score; so every way to cut
    a piece in two is a
    merge of that piece's rank. Among cuts of one piece the longest left part comes first, as in the
    tokenizer.json that
    Llama and Mistral were published with.
    """
    ids = {piece: number for number, piece in enumerate(pieces) if usable[number]}
    found: list[tuple[float, int, int, list[str]]] = []
    for piece, number in ids.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                found.append((-scores[number], -at, number, [left, right]))
    return [each[-1] for each in sorted(found)]


def parts(
    pieces: Sequence[str], *, unknown: str | None, byte_fallback: bool, prefix: bool
) -> dict[str, Any]:
    """Normalizer, pre-tokenizer and decoder, and what the model part says besides vocabulary and
    merges.

    `prefix` is the space that is put before a text, and taken off again when it is decoded.
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
