"""Row: one training sequence with loss weights and document bounds, whatever its objective.

Does not depend on how rows are read, packed or batched. Positions count inputs, 0 to seq_len - 1;
the target of position i is `ids[i + 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Role = Literal["chosen", "rejected", "good", "bad"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One answer of a preference row: positions `start` to `stop` of its document's inputs.

    Answers with the same `pair` belong together; labelled answers have a pair of their own.
    `margin` is by how much the chosen answer is better.
    """

    start: int
    stop: int
    pair: int
    role: Role
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class TopRow:
    """A teacher's most probable tokens at each target: ids int64 and log-probabilities fp32,
    `[seq_len, k]`; zeros where a target has no loss.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: `ids` [seq_len + 1] int64; `weights` [seq_len] fp32, of each target's loss.

    Targets of weight 0 (prompts, padding, the first token of the next document) have no loss.
    `starts` are the positions where documents begin, first 0; padding is a document of its own.
    `values` are named numbers of each target [seq_len] fp32 that an objective reads; all rows of a
    source have the same names.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    starts: tuple[int, ...] = (0,)
    segments: tuple[Segment, ...] = ()
    teacher: TopRow | None = None
    values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


class RowSource(Protocol):
    """Rows by global sample index: the same row for an index on every rank and after a resume.

    `windows` is the number of rows of an epoch, `names` the sources. `masked` rows have document
    bounds that attention must respect; `uniform` rows have weight 1 at every position.
    """

    seq_len: int
    names: list[str]
    windows: int
    masked: bool
    uniform: bool

    def source(self, index: int) -> int:
        """The index in `names` of the source of global sample `index`."""
        ...

    def row(self, index: int) -> Row:
        """Global sample `index`; indices beyond an epoch begin the next one."""
        ...


@runtime_checkable
class MeasuredRows(Protocol):
    """A `RowSource` whose rows end with padding that is neither computed nor counted."""

    def length(self, index: int) -> int:
        """Positions of global sample `index` before its padding."""
        ...
