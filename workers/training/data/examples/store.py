"""Encoded examples in memory-mapped arrays: written once per data, template and tokenizer.

Does not depend on sequence length, order or ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from workers.models.text.chat_format import EncodedText

_ARRAYS = {
    "ids": np.uint32,
    "trained": np.bool_,
    "offsets": np.int64,
    "answers": np.int64,
    "firsts": np.int64,
    "labels": np.int8,
    "margins": np.float32,
    "lines": np.int64,
}
NO_LABEL = -1
Kind = TypeVar("Kind", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Store:
    """Documents by `offsets` into `ids` and `trained`; example e has documents `firsts[e]` to
    `firsts[e + 1]`.

    `answers` is each document's first answer token; `labels` are 1, 0 or NO_LABEL; `lines` are
    line numbers in their files.
    """

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    answers: NDArray[np.int64]
    firsts: NDArray[np.int64]
    labels: NDArray[np.int8]
    margins: NDArray[np.float32]
    lines: NDArray[np.int64]
    resegmented: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def documents(self, example: int) -> list[tuple[int, int]]:
        """Start and stop of each document of an example, in tokens."""
        first, stop = int(self.firsts[example]), int(self.firsts[example + 1])
        return [
            (int(self.offsets[number]), int(self.offsets[number + 1]))
            for number in range(first, stop)
        ]


@dataclass(slots=True)
class StoreWriter:
    """Collects encoded examples in memory; `write` stores them."""

    ids: list[NDArray[np.uint32]] = field(default_factory=list)
    trained: list[NDArray[np.bool_]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=lambda: [0])
    labels: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    resegmented: int = 0

    def add(
        self, documents: Sequence[EncodedText], *, label: bool | None, margin: float, line: int
    ) -> None:
        """Add the documents of one example."""
        for document in documents:
            self.ids.append(np.asarray(document.ids, dtype=np.uint32))
            self.trained.append(np.asarray(document.trained, dtype=np.bool_))
            self.answers.append(document.answer)
            self.resegmented += document.resegmented
        self.firsts.append(self.firsts[-1] + len(documents))
        self.labels.append(NO_LABEL if label is None else int(label))
        self.margins.append(margin)
        self.lines.append(line)

    def store(self) -> Store:
        """What was added, in memory."""
        lengths = [0, *(len(each) for each in self.ids)]
        return Store(
            ids=_joined(self.ids, np.uint32),
            trained=_joined(self.trained, np.bool_),
            offsets=np.cumsum(lengths, dtype=np.int64),
            answers=np.asarray(self.answers, dtype=np.int64),
            firsts=np.asarray(self.firsts, dtype=np.int64),
            labels=np.asarray(self.labels, dtype=np.int8),
            margins=np.asarray(self.margins, dtype=np.float32),
            lines=np.asarray(self.lines, dtype=np.int64),
            resegmented=self.resegmented,
        )


def write_store(store: Store, folder: Path) -> None:
    """Write all arrays; the folder appears when it is complete."""
    hidden = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    for name in _ARRAYS:
        np.save(hidden / f"{name}.npy", getattr(store, name))
    (hidden / "store.json").write_text(json.dumps({"resegmented": store.resegmented}))
    try:
        os.rename(hidden, folder)
    except OSError:  # another process has just written the same
        shutil.rmtree(hidden, ignore_errors=True)
        if not folder.is_dir():
            raise


def open_store(folder: Path) -> Store:
    """Map the arrays of `write_store`."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    resegmented = json.loads((folder / "store.json").read_text())["resegmented"]
    return Store(**arrays, resegmented=resegmented)


def _joined(arrays: list[NDArray[Kind]], dtype: type[Kind]) -> NDArray[Kind]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
