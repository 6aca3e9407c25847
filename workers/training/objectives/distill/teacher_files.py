"""A teacher's most probable tokens in files, written once for all runs on the same examples.

`teacher.json` says which teacher wrote them; a folder per encoded source, named by a digest of its
tokens, holds `tokens.npy` and `logprobs.npy` `[T, k]`: for each of its T trained tokens, in order,
the k most probable ones at that place, most probable first. Does not run models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.contracts.specs.finetuning.objectives import TEACHER_MANIFEST
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.rows import placed_documents
from workers.training.data.examples.samples import ExampleSamples
from workers.training.data.examples.store import Store
from workers.training.data.rows import Row, TopRow

_FIELD = "train.distill.teacher"


def store_digest(store: Store) -> str:
    """A digest of the tokens of a source, which of them are trained, and their documents."""
    digest = hashlib.sha256()
    for array in (store.ids, store.trained, store.offsets):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def is_teacher_file(path: Path) -> bool:
    """Whether the folder holds a teacher's tokens instead of its weights."""
    return (path / TEACHER_MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What wrote the files. Raises UserError."""
    try:
        manifest = json.loads((folder / TEACHER_MANIFEST).read_text(encoding="utf-8"))
        int(manifest["top_k"]), int(manifest["vocab"]), int(manifest["seq_len"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{_FIELD}: {folder / TEACHER_MANIFEST} cannot be read ({error}). Write it again."
        ) from None
    return dict(manifest)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The files of one source; `numbers` is each token's number among the trained ones."""

    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    numbers: NDArray[np.int64]


class TaughtRows:
    """A `RowSource` of examples with a teacher's tokens at each target with loss.

    Raises UserError for files of other examples, another vocabulary or fewer tokens.
    """

    uniform = False

    def __init__(
        self, samples: ExampleSamples, folder: Path, *, vocab: int, top_k: int | None
    ) -> None:
        """`top_k`: use this many tokens; None: all of the files."""
        self.samples = samples
        self.seq_len, self.names, self.windows = samples.seq_len, samples.names, samples.windows
        self.masked = samples.masked
        manifest = read_manifest(folder)
        if manifest["vocab"] != vocab:
            raise UserError(
                f"{_FIELD}: {folder} is of a vocabulary of {manifest['vocab']} tokens, the model's "
                f"has {vocab}. Use a teacher with the same tokenizer."
            )
        self.top_k = top_k or int(manifest["top_k"])
        if self.top_k > manifest["top_k"]:
            raise UserError(
                f"train.distill.top_k: {folder} has {manifest['top_k']} tokens per position. "
                f"Use top_k {manifest['top_k']} or less."
            )
        if samples.seq_len > manifest["seq_len"]:
            raise UserError(
                f"{_FIELD}: the examples of {folder} were cut at {manifest['seq_len']} tokens. "
                f"Use seq_len {manifest['seq_len']}, or writing it again."
            )
        self._folder = folder
        self._opened: dict[str, _Tokens] = {}
        for name, store in samples.stores.items():
            self._opened[name] = self._open(name, store)

    def describe(self) -> dict[str, Any]:
        """Data of the event `data_statistics`."""
        return self.samples.describe()

    def source(self, index: int) -> int:
        """See `RowSource`."""
        return self.samples.source(index)

    def row(self, index: int) -> Row:
        """Global sample `index` with the teacher's tokens."""
        row, (source, examples) = self.samples.row(index), self.samples.examples(index)
        opened = self._opened[source.name]
        tokens = np.zeros((self.seq_len, self.top_k), dtype=np.int64)
        logprobs = np.zeros((self.seq_len, self.top_k), dtype=np.float32)
        for place in placed_documents(source.store, examples, self.samples.shape, self.seq_len):
            targets = slice(place.start + 1, place.start + place.length)
            trained = np.flatnonzero(source.store.trained[targets])
            numbers = opened.numbers[targets][trained]
            tokens[place.at + trained] = opened.tokens[numbers, : self.top_k]
            logprobs[place.at + trained] = opened.logprobs[numbers, : self.top_k]
        return Row(row.ids, row.weights, row.starts, row.segments, TopRow(tokens, logprobs))

    def _open(self, name: str, store: Store) -> _Tokens:
        folder = self._folder / store_digest(store)
        if not folder.is_dir():
            raise UserError(
                f"{_FIELD}: {self._folder} was written for other examples than {name}, or with "
                "another template, tokenizer or train_on. Write it again for this run's spec."
            )
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        logprobs = np.load(folder / "logprobs.npy", mmap_mode="r")
        count = int(store.trained.sum())
        if len(tokens) != count or tokens.shape != logprobs.shape:
            raise UserError(f"{_FIELD}: {folder} is incomplete. Write it again.")
        return _Tokens(tokens, logprobs, np.cumsum(store.trained, dtype=np.int64) - 1)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Make the folder a teacher file; call it last."""
    (folder / TEACHER_MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def write_tokens(
    folder: Path, store: Store, tokens: Sequence[NDArray[Any]], logprobs: Sequence[NDArray[Any]]
) -> None:
    """Write one source's tokens, `[T, k]` together."""
    target = folder / store_digest(store)
    target.mkdir(parents=True, exist_ok=True)
    np.save(target / "tokens.npy", np.concatenate(tokens).astype(np.uint32))
    np.save(target / "logprobs.npy", np.concatenate(logprobs).astype(np.float32))
