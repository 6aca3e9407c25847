"""One source's token ids as one long sequence, memory-mapped, and where in it documents begin.

Knows arrays; does not know files, tokenizers or samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]


class Stream:
    """Several arrays read as if they were one.

    Documents are told by `starts` (sorted places where one begins) or by `document_end` (the id of
    the token after
    each, with which the next one begins: attention from there on sees nothing before). With neither
    they are unknown.
    """

    def __init__(
        self,
        arrays: Sequence[Tokens],
        *,
        starts: NDArray[np.int64] | None = None,
        document_end: int | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        self.arrays, self.starts, self.document_end = list(arrays), starts, document_end
        self._ends: list[int] = np.cumsum([len(array) for array in self.arrays]).tolist()
        self._first: int = span[0] if span else 0
        self._stop: int = span[1] if span else self._ends[-1]

    @property
    def knows_documents(self) -> bool:
        return self.starts is not None or self.document_end is not None

    def __len__(self) -> int:
        return self._stop - self._first

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids of places `start` to `stop`, `[stop - start]`, int64."""
        found = np.empty(stop - start, dtype=np.int64)
        place, filled = self._first + start, 0
        index = bisect_right(self._ends, place)
        while filled < len(found):
            array = self.arrays[index]
            within = place + filled - (self._ends[index] - len(array))
            piece = array[within : within + len(found) - filled]
            found[filled : filled + len(piece)] = piece
            filled, index = filled + len(piece), index + 1
        return found

    def documents(self, start: int, ids: NDArray[np.int64]) -> list[int]:
        """Of the ids read from `start`: the places within them where documents begin, and 0,
        whatever begins there.
        """
        begins: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        if self.starts is not None:
            first = self._first + start
            low, high = np.searchsorted(self.starts, (first + 1, first + len(ids)))
            begins = np.asarray(self.starts[low:high]) - first
        elif self.document_end is not None:
            begins = 1 + np.flatnonzero(ids[1:] == self.document_end)
        return [0, *begins.tolist()]

    def split(self) -> tuple[Stream, Stream]:
        """What is learned from, and the last tenth held out for validation."""
        middle = self._stop - len(self) // 10
        told = {"starts": self.starts, "document_end": self.document_end}
        return (
            Stream(self.arrays, span=(self._first, middle), **told),  # type: ignore[arg-type]
            Stream(self.arrays, span=(middle, self._stop), **told),  # type: ignore[arg-type]
        )
