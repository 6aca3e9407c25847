"""Sequences of tokens by global sample index: the index is the full state of the data.

Any number of ranks sees the same samples, and a resumed run continues exactly. Does not depend on
ranks, batches or devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.runtime.exit_codes import UserError
from workers.training.data.mixture import Mixture
from workers.training.data.rows import Row
from workers.training.data.sources import Source


class Samples:
    """Consecutive windows of `seq_len` + 1 tokens, each source's in a seeded order per epoch.

    Sample i of a source's epoch e is window `permutation(seed, e)[i]`; `shuffle=False` keeps the
    text's order. Sources alternate by weight and have separate epochs. Documents are packed without
    padding: a window may begin and end inside one. `masked` samples report the document boundaries
    of each window.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_len: int,
        vocab: int,
        seed: int,
        shuffle: bool,
        name: str = "data",
        masked: bool = False,
    ) -> None:
        self.seq_len, self.masked, self.uniform = seq_len, masked, True
        self._ones = np.ones(seq_len, dtype=np.float32)
        self.names = [source.name for source in sources]
        self.mixture = Mixture([source.weight for source in sources])
        self.windows_by_source = [
            _Windows(
                source,
                seq_len=seq_len,
                vocab=vocab,
                seed=[seed, number] if number else [seed],
                shuffle=shuffle,
                name=name if len(sources) == 1 else f"{name} of {source.name}",
            )
            for number, source in enumerate(sources)
        ]
        self.windows = sum(each.windows for each in self.windows_by_source)

    def source(self, index: int) -> int:
        """The index in `names` of the source of global sample `index`."""
        return self.mixture.locate(index)[0]

    def window(self, index: int) -> NDArray[np.int64]:
        """Token ids of global sample `index`, `[seq_len + 1]`. Raises UserError for ids beyond the
        vocabulary.
        """
        source, number = self.mixture.locate(index)
        return self.windows_by_source[source].read(number)[1]

    def row(self, index: int) -> Row:
        """Global sample `index` with weight 1 everywhere, and its documents if `masked`."""
        if not self.masked:
            return Row(self.window(index), self._ones)
        ids, starts = self.packed(index)
        return Row(ids, self._ones, tuple(starts))

    def packed(self, index: int) -> tuple[NDArray[np.int64], list[int]]:
        """The window, and where documents begin in its inputs: `[0]` if its source has no
        boundaries.
        """
        source, number = self.mixture.locate(index)
        start, ids = self.windows_by_source[source].read(number)
        return ids, self.windows_by_source[source].stream.documents(start, ids[:-1])


class _Windows:
    """One source's windows in sampling order."""

    def __init__(
        self, source: Source, *, seq_len: int, vocab: int, seed: list[int], shuffle: bool, name: str
    ) -> None:
        self.stream, self.seq_len, self.vocab, self.seed, self.shuffle = (
            source.stream,
            seq_len,
            vocab,
            seed,
            shuffle,
        )
        self.name = name
        tokens = len(self.stream)
        self.windows = (tokens - 1) // seq_len
        if self.windows < 1:
            raise UserError(
                f"{name}: {tokens} tokens are shorter than one sequence of {seq_len} + 1. "
                f"Use more text, or seq_len {max(1, tokens - 1)} or less."
            )
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def read(self, number: int) -> tuple[int, NDArray[np.int64]]:
        """Where the source's sample `number` starts, and its ids.

        Raises UserError for an id outside the vocabulary.
        """
        epoch, place = divmod(number, self.windows)
        if self.shuffle:
            place = int(self._permutation(epoch)[place])
        start = place * self.seq_len
        ids = self.stream.read(start, start + self.seq_len + 1)
        largest = int(ids.max())
        if largest >= self.vocab:
            raise UserError(
                f"{self.name}: token id {largest} near token {start} is outside the model's "
                "vocabulary of "
                f"{self.vocab}. Use the tokenizer of this model, or vocab {largest + 1} or more."
            )
        return start, ids

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            first, *number = self.seed
            generator = np.random.default_rng([first, epoch, *number])
            self._order = epoch, generator.permutation(self.windows)
        return self._order[1]
