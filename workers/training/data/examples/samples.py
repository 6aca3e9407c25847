"""ExampleSamples: rows of examples by global sample index, the same on every rank.

The index is the full state of the data: a resumed run continues exactly, within an epoch too. Does
not depend on ranks, batches or devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.contracts.examples.example import Shape
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.packing import pack, shuffled
from workers.training.data.examples.rows import build_row, has_trained_tokens, placed_lengths
from workers.training.data.examples.statistics import Statistics, measure
from workers.training.data.examples.store import Store
from workers.training.data.mixture import Mixture
from workers.training.data.rows import Row


@dataclass(frozen=True, slots=True)
class ExampleSource:
    """One source's encoded examples, those from `first` to `stop`; `weight` is its share."""

    name: str
    store: Store
    first: int
    stop: int
    weight: float = 1.0


class ExampleSamples:
    """Rows of each source in a seeded order per epoch; sources alternate by weight.

    With `packing` several examples share a row (`packing.pack`), planned for each epoch;
    without it, and for pairs and labelled answers, each has a padded row. `shuffle=False` keeps the
    order of the files.
    """

    uniform = False

    def __init__(
        self,
        sources: Sequence[ExampleSource],
        *,
        shape: Shape,
        seq_len: int,
        packing: bool,
        seed: int,
        shuffle: bool,
        name: str = "data",
    ) -> None:
        self.seq_len, self.shape = seq_len, shape
        # attention to earlier tokens never reaches the padding after a single document
        self.masked = shape == "pairs" or (packing and shape == "answers")
        self.names = [source.name for source in sources]
        self.mixture = Mixture([source.weight for source in sources])
        self._rows = [
            _SourceRows(
                source,
                shape=shape,
                seq_len=seq_len,
                packing=packing and shape == "answers",
                seed=seed,
                number=number,
                shuffle=shuffle,
                name=name if len(sources) == 1 else f"{name} of {source.name}",
            )
            for number, source in enumerate(sources)
        ]
        self.windows = sum(each.epoch_rows for each in self._rows)

    @property
    def stores(self) -> dict[str, Store]:
        """Encoded examples by source."""
        return {each.source.name: each.source.store for each in self._rows}

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics of the first epoch by source."""
        return {name: rows.statistics for name, rows in zip(self.names, self._rows, strict=True)}

    def describe(self) -> dict[str, Any]:
        """Data of the event `data_statistics`."""
        sources = {name: each.to_dict() for name, each in self.statistics.items()}
        return {"shape": self.shape, "seq_len": self.seq_len, "sources": sources}

    def source(self, index: int) -> int:
        """The index in `names` of the source of global sample `index`."""
        return self.mixture.locate(index)[0]

    def row(self, index: int) -> Row:
        """Global sample `index`; indices beyond an epoch begin the next one."""
        source, number = self.mixture.locate(index)
        return self._rows[source].row(number)

    def examples(self, index: int) -> tuple[ExampleSource, list[int]]:
        """The source of global sample `index` and the examples in its row."""
        source, number = self.mixture.locate(index)
        return self._rows[source].source, self._rows[source].examples(number)

    def document_lengths(self, index: int) -> list[int]:
        """Tokens of each document in the row of global sample `index`, in order."""
        source, number = self.mixture.locate(index)
        return self._rows[source].document_lengths(number)


class _SourceRows:
    """One source's rows in sampling order."""

    def __init__(
        self,
        source: ExampleSource,
        *,
        shape: Shape,
        seq_len: int,
        packing: bool,
        seed: int,
        number: int,
        shuffle: bool,
        name: str,
    ) -> None:
        self.source, self.shape, self.seq_len, self.packing = source, shape, seq_len, packing
        self.seed, self.number, self.shuffle = seed, number, shuffle
        self._limits = limits = placed_lengths(source.store, shape, seq_len)
        candidates = range(source.first, source.stop)
        self.used = [
            each for each in candidates if has_trained_tokens(source.store, each, limits[each])
        ]
        self._refuse_unusable(len(candidates), name)
        self._lengths: NDArray[np.int64] = np.array(
            [sum(limits[each]) for each in self.used], dtype=np.int64
        )
        self._plans: dict[int, list[list[int]]] = {}
        self._ends = [len(self._plan(0))]
        self.epoch_rows = self._ends[0]
        self.statistics = measure(
            source.store,
            self.used,
            limits,
            rows=self.epoch_rows,
            seq_len=seq_len,
            dropped=len(candidates) - len(self.used),
        )

    def row(self, number: int) -> Row:
        """Row `number` of the source, counted over epochs."""
        return build_row(self.source.store, self.examples(number), self.shape, self.seq_len)

    def examples(self, number: int) -> list[int]:
        """The examples in row `number`."""
        while number >= self._ends[-1]:
            self._ends.append(self._ends[-1] + len(self._plan(len(self._ends))))
        epoch = bisect_right(self._ends, number)
        place = number - (self._ends[epoch - 1] if epoch else 0)
        return [self.used[each] for each in self._plan(epoch)[place]]

    def document_lengths(self, number: int) -> list[int]:
        """Tokens of each document in row `number`."""
        return [length for each in self.examples(number) for length in self._limits[each]]

    def _plan(self, epoch: int) -> list[list[int]]:
        """The rows of an epoch; the two newest plans are kept."""
        if epoch not in self._plans:
            seed = [self.seed, epoch, *([self.number] if self.number else [])]
            order = shuffled(len(self.used), seed if self.shuffle else None)
            if self.packing:
                rows = pack(self._lengths, self.seq_len + 1, order=order)
                places = shuffled(len(rows), [*seed, 1] if self.shuffle else None)
                plan = [rows[place] for place in places]
            else:
                plan = [[int(each)] for each in order]
            for old in sorted(self._plans)[:-1]:
                del self._plans[old]
            self._plans[epoch] = plan
        return self._plans[epoch]

    def _refuse_unusable(self, count: int, name: str) -> None:
        """Raises UserError if no example is left, or if labels are of one kind."""
        if not count:
            raise UserError(f"{name}: there are no examples. Use a file with more lines.")
        if not self.used:
            raise UserError(
                f"{name}: all {count} examples are longer than a sequence before their first "
                f"trained token. Use a seq_len above {self.seq_len}."
            )
        if self.shape == "labels":
            kinds = Counter(int(self.source.store.labels[each]) for each in self.used)
            if len(kinds) < 2:
                label = "good" if 1 in kinds else "bad"
                raise UserError(
                    f"{name}: all {len(self.used)} answers are labelled {label}. Use lines with "
                    "label true and lines with label false."
                )
