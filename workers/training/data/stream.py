"""One source's token ids as one long memory-mapped sequence, with its document boundaries.

Does not depend on files, tokenizers or samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]


class Stream:
    """Several arrays read as one.

    Boundaries come from `starts` (sorted positions of first tokens) or `document_end` (the id after
    each document; the next one begins at that id, and attention does not see earlier tokens). With
    neither they are unknown.
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
        """Whether document boundaries are known."""
        return self.starts is not None or self.document_end is not None

    def __len__(self) -> int:
        return self._stop - self._first

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids of positions `start` to `stop`, `[stop - start]`, int64."""
        ids = np.empty(stop - start, dtype=np.int64)
        position, filled = self._first + start, 0
        index = bisect_right(self._ends, position)
        while filled < len(ids):
            array = self.arrays[index]
            within = position + filled - (self._ends[index] - len(array))
            piece = array[within : within + len(ids) - filled]
            ids[filled : filled + len(piece)] = piece
            filled, index = filled + len(piece), index + 1
        return ids

    def documents(self, start: int, ids: NDArray[np.int64]) -> list[int]:
        """Positions within `ids`, read from `start`, where documents begin; always includes 0."""
        begins: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        if self.starts is not None:
            first = self._first + start
            low, high = np.searchsorted(self.starts, (first + 1, first + len(ids)))
            begins = np.asarray(self.starts[low:high]) - first
        elif self.document_end is not None:
            begins = 1 + np.flatnonzero(ids[1:] == self.document_end)
        return [0, *begins.tolist()]

    def split(self) -> tuple[Stream, Stream]:
        """The training part, and the last tenth for validation."""
        middle = self._stop - len(self) // 10
        boundaries = {"starts": self.starts, "document_end": self.document_end}
        return (
            Stream(self.arrays, span=(self._first, middle), **boundaries),  # type: ignore[arg-type]
            Stream(self.arrays, span=(middle, self._stop), **boundaries),  # type: ignore[arg-type]
        )
