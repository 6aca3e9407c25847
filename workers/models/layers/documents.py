"""Where documents begin in packed sequences, and in which pieces attention within them is computed.

Integers and masks; does not know tokens, models or kernels. Shapes: B batch, S sequence, Q queries,
K keys.
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

# Short documents are attended to together, up to so many tokens, under a mask. Of 4 x 512 tokens in
# documents of 8, 4
# heads of 32, forward and backward on one core, that takes 5 ms (with 128: 8), a call for each 13,
# plain attention 24.
TILE = 64
_numbers = count()
_alive: WeakValueDictionary[int, Documents] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries and keys of one kernel call, as places in a sequence. Every query sees a key.

    With `starts` (documents' beginnings from the first query on, as many queries as keys) query i
    sees the keys of its
    own document up to i; without, the one document that all are of, query i sees key j with j <= i
    + `ahead`. In both
    only the last `window` of them, where there is one.
    """

    queries: slice
    keys: slice
    starts: tuple[int, ...] = ()
    ahead: int = 0
    window: int | None = None

    @property
    def causal(self) -> bool:
        """Whether a kernel that knows causal masks needs no other."""
        return len(self.starts) < 2 and self.ahead == 0 and self.window is None

    def seen(self, device: torch.device) -> Tensor | None:
        """True where a query sees a key, `[Q, K]`; None where `causal` says it."""
        if self.causal:
            return None
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        if len(self.starts) < 2:
            return _within(queries, keys, self.ahead, self.window, device)
        return _of_several(queries, self.starts, self.window, device)


@dataclass(eq=False)
class Documents:
    """A micro-batch's documents: `starts` of each row, the first of which is 0, sorted; rows are
    `length` long.

    A document does not go on in the next row. `offsets` are for kernels that take many sequences of
    different lengths:
    where each document begins in all rows one after another, and the end, `[documents + 1]` int32
    on the device.
    """

    starts: Sequence[Sequence[int]]
    length: int
    device: torch.device
    number: int = field(default_factory=lambda: next(_numbers), init=False)
    offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for rows that do not begin with a document, or beginnings that are not
        in order.
        """
        for row in self.starts:
            if (
                not row
                or row[0] != 0
                or row[-1] >= self.length
                or any(a >= b for a, b in pairwise(row))
            ):
                raise ValueError(
                    f"documents begin at {list(row)} of {self.length} positions; try 0 and rising "
                    "places"
                )
        offsets = torch.tensor(self.places, dtype=torch.int32)
        self.offsets = offsets
        if self.device.type == "cuda":
            self.offsets = offsets.pin_memory().to(self.device, non_blocking=True)
        _alive[self.number] = self

    @staticmethod
    def of(number: int) -> Documents:
        """The living one of that number, which is what an operator can be given."""
        return _alive[number]

    @cached_property
    def places(self) -> list[int]:
        """Where documents begin in all rows one after another, and where the last one ends."""
        rows = enumerate(self.starts)
        return [
            *(row * self.length + start for row, starts in rows for start in starts),
            len(self.starts) * self.length,
        ]

    @cached_property
    def longest(self) -> int:
        return max(stop - start for start, stop in pairwise(self.places))

    @property
    def whole(self) -> bool:
        """Whether every row is one document: attention is then as without documents."""
        return len(self.places) == len(self.starts) + 1

    def pieces(self, window: int | None) -> tuple[int, list[Piece]]:
        """In how many equal parts all rows, one after another, are to be seen, and the pieces of
        each part.
        """
        if self.whole:
            return len(self.starts), pieces_of([0, self.length], window)
        return 1, pieces_of(self.places, window)

    def positions(self) -> Tensor:
        """Of every token its place in its document, `[B, S]`."""
        starts = torch.tensor(self.places[:-1], device=self.device)
        lengths = torch.tensor(self.places, device=self.device).diff()
        every = torch.arange(self.places[-1], device=self.device)
        return (every - starts.repeat_interleave(lengths, output_size=len(every))).view(
            -1, self.length
        )


def pieces_of(places: Sequence[int], window: int | None) -> list[Piece]:
    """The pieces of documents that begin at `places`, the last of which is the end.

    Together they are linear in the number of tokens where a window, or the documents, are short
    beside them.
    """
    found: list[Piece] = []
    index, last = 0, len(places) - 1
    while index < last:
        start = places[index]
        # as many documents as fit
        after = max(index + 1, bisect_right(places, start + TILE) - 1)
        stop = places[after]
        if after > index + 1:
            cuts, narrow = tuple(each - start for each in places[index:after]), window
            if window is not None and all(
                b - a <= window for a, b in pairwise(places[index : after + 1])
            ):
                narrow = None
            found.append(Piece(slice(start, stop), slice(start, stop), cuts, window=narrow))
        else:
            found += _of_one(start, stop, window)
        index = after
    return found


def _of_one(start: int, stop: int, window: int | None) -> list[Piece]:
    """One document; where a window is shorter, as many queries at once as it is long, with the keys
    that they see.
    """
    if window is None or stop - start <= window:
        return [Piece(slice(start, stop), slice(start, stop))]
    found = [Piece(slice(start, start + window), slice(start, start + window))]
    for first in range(start + window, stop, window):
        ahead = window - 1
        until = min(stop, first + window)
        found.append(
            Piece(slice(first, until), slice(first - ahead, until), ahead=ahead, window=window)
        )
    return found


def _within(
    queries: int, keys: int, ahead: int, window: int | None, device: torch.device
) -> Tensor:
    query, key = (
        torch.arange(queries, device=device)[:, None] + ahead,
        torch.arange(keys, device=device)[None, :],
    )
    return key <= query if window is None else (key <= query) & (key > query - window)


@lru_cache(maxsize=1024)  # of TILE tokens; every layer and both passes want the same
def _of_several(
    tokens: int, starts: tuple[int, ...], window: int | None, device: torch.device
) -> Tensor:
    begins = torch.zeros(tokens, dtype=torch.int64)
    begins[list(starts)] = 1
    document = begins.cumsum(0).to(device)
    return _within(tokens, tokens, 0, window, device) & (document[:, None] == document[None, :])
