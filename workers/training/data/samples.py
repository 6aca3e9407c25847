"""Sequences of tokens by global sample index: the index is the whole state of the data.

Any number of ranks sees the same samples, and a resumed run goes on exactly. Does not know ranks,
batches or devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.runtime.exits import UserError
from workers.training.data.mixture import Mixture
from workers.training.data.sources import Source


class Samples:
    """Windows of `seq_len` + 1 tokens, back to back, each source's in a seeded order that changes
    every epoch.

    Sample i of a source's epoch e is window `permutation(seed, e)[i]`; `shuffle=False` keeps the
    text's order. Sources
    take turns by weight, and each has epochs of its own. Documents are packed without padding: a
    window may begin and
    end within one. `masked` samples tell where in a window documents begin.
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
        self.seq_len, self.masked = seq_len, masked
        self.names = [source.name for source in sources]
        self.mixture = Mixture([source.weight for source in sources])
        self.of_source = [
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
        self.windows = sum(each.windows for each in self.of_source)

    def source(self, index: int) -> int:
        """Which of `names` global sample `index` comes from."""
        return self.mixture.place(index)[0]

    def window(self, index: int) -> NDArray[np.int64]:
        """Token ids of global sample `index`, `[seq_len + 1]`.

        Raises UserError for ids outside the vocabulary.
        """
        source, number = self.mixture.place(index)
        return self.of_source[source].read(number)[1]

    def packed(self, index: int) -> tuple[NDArray[np.int64], list[int]]:
        """The window, and where in its inputs documents begin: 0 alone where its source does not
        know them.
        """
        source, number = self.mixture.place(index)
        start, found = self.of_source[source].read(number)
        return found, self.of_source[source].stream.documents(start, found[:-1])


class _Windows:
    """One source's windows in the order in which they are taken."""

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
                f"{name}: {tokens} tokens are shorter than one sequence of {seq_len} + 1; "
                f"try more text, or seq_len {max(1, tokens - 1)} or less"
            )
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def read(self, number: int) -> tuple[int, NDArray[np.int64]]:
        """Where the source's sample `number` starts, and its ids."""
        epoch, place = divmod(number, self.windows)
        if self.shuffle:
            place = int(self._permutation(epoch)[place])
        start = place * self.seq_len
        found = self.stream.read(start, start + self.seq_len + 1)
        largest = int(found.max())
        if largest >= self.vocab:
            raise UserError(
                f"{self.name}: token id {largest} near token {start} is outside the model's "
                "vocabulary of "
                f"{self.vocab}; try the tokenizer of this model, or vocab {largest + 1} or more"
            )
        return start, found

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            first, *number = self.seed
            generator = np.random.default_rng([first, epoch, *number])
            self._order = epoch, generator.permutation(self.windows)
        return self._order[1]
