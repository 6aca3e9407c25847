"""Rows of encoded examples: packed or padded answers, pairs, and labelled answers.

Does not depend on order: which examples share a row is given. Texts that are too long are cut at
their end; a pair's two documents are cut to what the row has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.contracts.examples.example import Shape
from workers.training.data.examples.store import Store
from workers.training.data.rows import Role, Row, Segment

_PAIR: tuple[Role, Role] = ("chosen", "rejected")


def capacity(shape: Shape, seq_len: int) -> int:
    """Tokens of a row: the last token of an answer need not be an input, a scored one must be."""
    return seq_len + 1 if shape == "answers" else seq_len


def placed_lengths(store: Store, shape: Shape, seq_len: int) -> list[list[int]]:
    """Of each example, the tokens of each document that a row holds."""
    most = capacity(shape, seq_len)
    return [
        _limits([stop - start for start, stop in store.documents(example)], most)
        for example in range(len(store))
    ]


def has_trained_tokens(store: Store, example: int, limits: Sequence[int]) -> bool:
    """Whether every document has a target with loss within its limit."""
    return all(
        bool(store.trained[start + 1 : start + limit].any())
        for (start, _), limit in zip(store.documents(example), limits, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document in a row: its first `length` tokens, from `start` of the store, from `at` on.

    `number` counts the documents of `example`.
    """

    example: int
    number: int
    start: int
    length: int
    at: int


def placed_documents(
    store: Store, examples: Sequence[int], shape: Shape, seq_len: int
) -> Iterator[PlacedDocument]:
    """The documents of a row of `examples`, one after another."""
    at, most = 0, capacity(shape, seq_len)
    for example in examples:
        documents = store.documents(example)
        limits = _limits([stop - start for start, stop in documents], most)
        for number, ((start, _), length) in enumerate(zip(documents, limits, strict=True)):
            yield PlacedDocument(example, number, start, length, at)
            at += length


def build_row(store: Store, examples: Sequence[int], shape: Shape, seq_len: int) -> Row:
    """The row of `examples`, padded with id 0 at its end. Their documents must fit."""
    ids = np.zeros(seq_len + 1, dtype=np.int64)
    weights = np.zeros(seq_len, dtype=np.float32)
    starts: list[int] = []
    segments: list[Segment] = []
    end = 0
    for each in placed_documents(store, examples, shape, seq_len):
        at, length = each.at, each.length
        end = at + length
        ids[at:end] = store.ids[each.start : each.start + length]
        weights[at : end - 1] = _targets(store.trained, each.start, length)
        starts.append(at)
        if shape != "answers":
            role = _role(store, each.example, each.number, shape)
            margin = float(store.margins[each.example])
            segments.append(Segment(at, end, each.example, role, margin))
    if end < seq_len:
        starts.append(end)
    return Row(ids, weights, tuple(starts), tuple(segments))


def _targets(trained: NDArray[np.bool_], start: int, length: int) -> NDArray[np.bool_]:
    return trained[start + 1 : start + length]


def _role(store: Store, example: int, number: int, shape: Shape) -> Role:
    if shape == "pairs":
        return _PAIR[number]
    return "good" if store.labels[example] == 1 else "bad"


def _limits(lengths: Sequence[int], most: int) -> list[int]:
    """Lengths that fit into `most` together: what one does not need the other gets."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    one, other = lengths
    if one + other <= most:
        return [one, other]
    first = min(one, max(most // 2, most - other))
    return [first, min(other, most - first)]
