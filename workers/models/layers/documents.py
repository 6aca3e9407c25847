"""Boundaries of documents in packed sequences, and the chunks in which their attention is computed.

Does not depend on tokens, models or kernels. Shapes: B batch, S sequence, Q queries, K keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count, pairwise
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Short documents are computed together with a mask, up to TILE tokens. 4 x 512 tokens in documents
# of 8, 4 heads of 32, forward and backward on one core, take 5 ms (with 128: 8), one call per
# document 13, plain attention 24.
TILE = 64
_numbers = count()
_alive: WeakValueDictionary[int, Documents] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Queries and keys of one kernel call, as positions in a sequence. Every query sees a key.

    With `starts` (document starts relative to the first query, as many queries as keys) query i
    sees the keys of its own document up to i; without (a single document) query i sees key j with
    j <= i + `ahead`. With a `window`, only the last `window` of them.
    """

    queries: slice
    keys: slice
    starts: tuple[int, ...] = ()
    ahead: int = 0
    window: int | None = None

    @property
    def causal(self) -> bool:
        """Whether a causal mask is sufficient."""
        return len(self.starts) < 2 and self.ahead == 0 and self.window is None

    def seen(self, device: torch.device) -> Tensor | None:
        """Mask `[Q, K]`, true where a query sees a key; None if `causal`."""
        if self.causal:
            return None
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        if len(self.starts) < 2:
            return _window_mask(queries, keys, self.ahead, self.window, device)
        return _document_mask(queries, self.starts, self.window, device)


@dataclass(eq=False)
class Documents:
    """A micro-batch's documents: sorted `starts` of each row (the first is 0) of `length` tokens.

    A document does not continue in the next row. `offsets` are for variable-length kernels: the
    start of each document in the concatenated rows, and the end, `[documents + 1]` int32 on the
    device.
    """

    starts: Sequence[Sequence[int]]
    length: int
    device: torch.device
    number: int = field(default_factory=lambda: next(_numbers), init=False)
    offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for rows that do not start with a document, or unsorted starts."""
        for row in self.starts:
            if (
                not row
                or row[0] != 0
                or row[-1] >= self.length
                or any(a >= b for a, b in pairwise(row))
            ):
                raise ValueError(
                    f"documents start at {list(row)} of {self.length} positions. Use 0 and "
                    "ascending positions."
                )
        offsets = torch.tensor(self.places, dtype=torch.int32)
        self.offsets = offsets
        if self.device.type == "cuda":
            self.offsets = offsets.pin_memory().to(self.device, non_blocking=True)
        _alive[self.number] = self

    @staticmethod
    def of(number: int) -> Documents:
        """The documents with that number, which operators take as argument."""
        return _alive[number]

    @cached_property
    def places(self) -> list[int]:
        """Starts of documents in the concatenated rows, and the end of the last one."""
        rows = enumerate(self.starts)
        return [
            *(row * self.length + start for row, starts in rows for start in starts),
            len(self.starts) * self.length,
        ]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(stop - start for start, stop in pairwise(self.places))

    @property
    def whole(self) -> bool:
        """Whether every row is one document, so attention is the same as without documents."""
        return len(self.places) == len(self.starts) + 1

    def after(self, tokens: int) -> Documents:
        """The documents with `tokens` more positions before each row, in its first document."""
        starts = [[0, *(start + tokens for start in row[1:])] for row in self.starts]
        return Documents(starts, self.length + tokens, self.device)

    def chunks(self, window: int | None) -> tuple[int, list[AttentionChunk]]:
        """The number of equal batches of the concatenated rows, and the chunks of each batch."""
        if self.whole:
            return len(self.starts), attention_chunks([0, self.length], window)
        return 1, attention_chunks(self.places, window)

    def positions(self) -> Tensor:
        """The position of every token in its document, `[B, S]`."""
        starts = torch.tensor(self.places[:-1], device=self.device)
        lengths = torch.tensor(self.places, device=self.device).diff()
        every = torch.arange(self.places[-1], device=self.device)
        return (every - starts.repeat_interleave(lengths, output_size=len(every))).view(
            -1, self.length
        )


def attention_chunks(places: Sequence[int], window: int | None) -> list[AttentionChunk]:
    """The chunks of documents that start at `places`; the last entry is the end.

    Their total size is linear in the number of tokens if the window or the documents are short.
    """
    chunks: list[AttentionChunk] = []
    index, last = 0, len(places) - 1
    while index < last:
        start = places[index]
        # as many documents as fit
        after = max(index + 1, bisect_right(places, start + TILE) - 1)
        stop = places[after]
        if after > index + 1:
            starts, narrow = tuple(place - start for place in places[index:after]), window
            if window is not None and all(
                b - a <= window for a, b in pairwise(places[index : after + 1])
            ):
                narrow = None
            chunks.append(
                AttentionChunk(slice(start, stop), slice(start, stop), starts, window=narrow)
            )
        else:
            chunks += _chunks_of_document(start, stop, window)
        index = after
    return chunks


def _chunks_of_document(start: int, stop: int, window: int | None) -> list[AttentionChunk]:
    """The chunks of one document: `window` queries at a time with the keys that they see."""
    if window is None or stop - start <= window:
        return [AttentionChunk(slice(start, stop), slice(start, stop))]
    chunks = [AttentionChunk(slice(start, start + window), slice(start, start + window))]
    for first in range(start + window, stop, window):
        ahead = window - 1
        until = min(stop, first + window)
        chunks.append(
            AttentionChunk(
                slice(first, until), slice(first - ahead, until), ahead=ahead, window=window
            )
        )
    return chunks


def _window_mask(
    queries: int, keys: int, ahead: int, window: int | None, device: torch.device
) -> Tensor:
    query, key = (
        torch.arange(queries, device=device)[:, None] + ahead,
        torch.arange(keys, device=device)[None, :],
    )
    return key <= query if window is None else (key <= query) & (key > query - window)


@lru_cache(maxsize=1024)  # of TILE tokens; every layer and both passes use the same
def _document_mask(
    tokens: int, starts: tuple[int, ...], window: int | None, device: torch.device
) -> Tensor:
    begins = torch.zeros(tokens, dtype=torch.int64)
    begins[list(starts)] = 1
    document = begins.cumsum(0).to(device)
    return _window_mask(tokens, tokens, 0, window, device) & (
        document[:, None] == document[None, :]
    )
