"""The first rows of a run as text: tokens by loss weight, documents and padding.

Reads rows as training does. Does not depend on how they are shown.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from workers.contracts.wire.samples import RowDocument, TokenPiece, TrainingRow, TrainingRows
from workers.models.text.chat_format import ChatFormat
from workers.training.data.examples.preview_texts import token_texts
from workers.training.data.examples.samples import ExampleSamples
from workers.training.data.rows import Row

ROWS = 4
MOST_TOKENS = 600  # of a row that are shown


def describe_rows(samples: ExampleSamples, chat: ChatFormat, *, count: int = ROWS) -> TrainingRows:
    """The first `count` rows, of at most one epoch; a row shows its first MOST_TOKENS tokens."""
    rows = [_describe(samples, index, chat) for index in range(min(count, samples.windows))]
    return TrainingRows(
        seq_len=samples.seq_len, shape=samples.shape, template=chat.template, rows=rows
    )


def _describe(samples: ExampleSamples, index: int, chat: ChatFormat) -> TrainingRow:
    row = samples.row(index)
    source, examples = samples.examples(index)
    store = source.store
    documents: list[RowDocument] = []
    left, at = MOST_TOKENS, 0
    lengths = samples.document_lengths(index)
    lines = [int(store.lines[each]) for each in examples for _ in store.documents(each)]
    for number, (length, line) in enumerate(zip(lengths, lines, strict=True)):
        shown = min(length, left)
        left -= shown
        documents.append(
            RowDocument(
                line=line,
                role=row.segments[number].role if row.segments else "",
                tokens=length,
                trained=int((_weights(row, at, length) > 0).sum()),
                hidden=length - shown,
                pieces=_pieces(row, at, shown, chat),
            )
        )
        at += length
    return TrainingRow(
        source=source.name, documents=documents, padding=max(0, samples.seq_len - at)
    )


def _weights(row: Row, start: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The weight of each token of a document as a target; its first token has none."""
    weights = np.zeros(length, dtype=np.float32)
    weights[1:] = row.weights[start : start + max(0, length - 1)]
    return weights


def _pieces(row: Row, start: int, length: int, chat: ChatFormat) -> list[TokenPiece]:
    pairs = zip(
        _weights(row, start, length).tolist(), row.ids[start : start + length].tolist(), strict=True
    )
    return [
        TokenPiece(
            weight=round(weight, 6), tokens=token_texts([number for _, number in group], chat)
        )
        for weight, group in groupby(pairs, key=lambda each: each[0])
    ]
