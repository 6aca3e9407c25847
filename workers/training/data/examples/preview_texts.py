"""Texts of a preview: tokens with roles and loss, and the histogram of lengths.

Pure functions of encoded examples. Does not depend on files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from workers.contracts.examples.example import Completion, Example
from workers.models.text.chat_format import ChatFormat, EncodedText
from workers.training.data.examples.store import Store

MOST_TOKENS = 1500  # per document that are shown
BINS = 32
# control characters in caret notation
_VISIBLE = {code: f"^{chr(code + 64)}" for code in range(32) if chr(code) not in "\n\t"}


def describe_example(
    line: int,
    example: Example,
    documents: Sequence[EncodedText],
    limits: Sequence[int],
    chat: ChatFormat,
) -> dict[str, Any]:
    """One sample: its roles, and the pieces of each document by how training uses them."""
    names = ("chosen", "rejected") if len(documents) == 2 else ("",)
    label = None if example.label is None else ("good" if example.label else "bad")
    return {
        "line": line,
        "label": label,
        "margin": example.margin,
        "roles": _roles(example),
        "documents": [
            {
                "name": name,
                "tokens": len(document.ids),
                "trained": sum(document.trained[1:]),
                "cut": max(0, len(document.ids) - limit),
                "pieces": _pieces(document, limit, chat),
            }
            for name, document, limit in zip(names, documents, limits, strict=True)
        ],
    }


def length_histogram(store: Store, seq_len: int) -> dict[str, Any]:
    """Counts of examples by tokens in BINS bins of equal width, and how many exceed a row."""
    lengths = [
        sum(stop - start for start, stop in store.documents(number)) for number in range(len(store))
    ]
    width = max(1, -(-(max(lengths) + 1) // BINS))
    counts = np.bincount(np.asarray(lengths) // width)
    return {
        "width": width,
        "counts": [int(count) for count in counts],
        "median": int(np.median(lengths)),
        "over": sum(length > seq_len + 1 for length in lengths),
    }


def _roles(example: Example) -> list[str]:
    text = example.texts[0]
    if isinstance(text, Completion):
        return ["prompt", "completion"]
    return [str(message["role"]) for message in text.messages]


def _pieces(document: EncodedText, limit: int, chat: ChatFormat) -> list[dict[str, Any]]:
    """Tokens one by one, those of the same use and of one character joined."""
    shown = document.ids[:MOST_TOKENS]
    uses = [
        "cut" if place >= limit else "trained" if document.trained[place] else "read"
        for place in range(len(shown))
    ]
    pieces = []
    for use, group in groupby(zip(uses, shown, strict=True), key=lambda each: each[0]):
        ids = [number for _, number in group]
        pieces.append({"use": use, "tokens": token_texts(ids, chat)})
    if len(document.ids) > MOST_TOKENS:
        more = len(document.ids) - MOST_TOKENS
        pieces.append({"use": "more", "tokens": [str(more)]})
    return pieces


def token_texts(ids: Sequence[int], chat: ChatFormat) -> list[str]:
    """The text of each token; tokens that share a character are one text."""
    texts, pending = list[str](), list[int]()
    for number in ids:
        pending.append(number)
        text = chat.decode(pending)
        if "\ufffd" in text and len(pending) < 4:
            continue
        texts.append(text.translate(_VISIBLE))
        pending = []
    if pending:
        texts.append(chat.decode(pending))
    return texts
