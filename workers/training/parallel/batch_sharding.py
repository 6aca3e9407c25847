"""Splits a global batch into micro-batches per rank, as a function of the global sample index.

Any number of ranks sees the same global batches. Does not depend on where samples come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from workers.models.layers.documents import Documents
from workers.training.data.rows import Row, RowSource

IGNORED = -100  # target without loss; cross_entropy's default


@dataclass(frozen=True, slots=True)
class Microbatch:
    """`count` samples from global sample `first` on, and `missing` rows of padding."""

    first: int
    count: int
    missing: int = 0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """A teacher's most probable tokens at each position: ids and log-probabilities `[B, S, k]`."""

    tokens: Tensor
    logprobs: Tensor


# what an objective keeps of a frozen module's output at the same positions
Reference = Tensor | TopTokens


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch's tensors `[micro_batch_size, S]`: of complete sequences or a rank's positions.

    `inputs` and `targets` are int64; targets without loss are IGNORED. `weights` (fp32) are None if
    every other target has weight 1. `documents` and `rows` are those of complete sequences of
    `length`; padding is not a row. `reference` is of a frozen module, or of its file; `values` are
    the rows' named numbers at the same positions (fp32, 0 in padding). `places` is set if the
    rows were joined to one sequence: of its first positions, those in the concatenated rows.
    """

    microbatch: Microbatch
    inputs: Tensor
    targets: Tensor
    documents: Documents | None
    weights: Tensor | None = None
    rows: tuple[Row, ...] = ()
    length: int = 0
    reference: Reference | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    places: Tensor | None = None


def microbatches_for(
    first: int, samples: int, *, micro_batch_size: int, dp: int, rank: int
) -> list[Microbatch]:
    """The micro-batches of data-parallel `rank` in the batch of `samples` samples from `first` on.

    Micro-batch m of rank r starts at sample (m · dp + r) · micro_batch_size: the same groups for
    every dp. All ranks get the same number of micro-batches, padded at the end, because sharded
    models step together.
    """
    rounds = -(-samples // (micro_batch_size * dp))
    microbatches = []
    for index in range(rank, rounds * dp, dp):
        start = index * micro_batch_size
        count = max(0, min(micro_batch_size, samples - start))
        microbatches.append(Microbatch(first + start, count, micro_batch_size - count))
    return microbatches


def load_microbatch(samples: RowSource, microbatch: Microbatch, device: torch.device) -> Batch:
    """The micro-batch's complete sequences on `device`; rows of padding have no targets."""
    rows = tuple(samples.row(microbatch.first + index) for index in range(microbatch.count))
    ids = np.zeros((microbatch.count + microbatch.missing, samples.seq_len + 1), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index] = row.ids
    starts = [list(row.starts) for row in rows] + [[0]] * microbatch.missing
    documents = Documents(starts, samples.seq_len, device) if samples.masked else None
    tokens = torch.from_numpy(ids)
    # copies: of a single row, both would be views of the same memory
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    targets[microbatch.count :] = IGNORED
    weights = None if samples.uniform else _apply_weights(rows, targets)
    if device.type == "cuda":
        inputs, targets = (
            each.pin_memory().to(device, non_blocking=True) for each in (inputs, targets)
        )
        weights = None if weights is None else weights.pin_memory().to(device, non_blocking=True)
    teacher = _top_tokens(rows, microbatch, samples.seq_len, device)
    values = _values(rows, targets.shape, device)
    length = samples.seq_len
    return Batch(microbatch, inputs, targets, documents, weights, rows, length, teacher, values)


def _top_tokens(
    rows: tuple[Row, ...], microbatch: Microbatch, length: int, device: torch.device
) -> TopTokens | None:
    """The teacher's tokens of rows that have some; zeros in rows of padding."""
    count = max(
        (0 if row.teacher is None else row.teacher.tokens.shape[1] for row in rows), default=0
    )
    if not count:
        return None
    shape = (microbatch.count + microbatch.missing, length, count)
    tokens, logprobs = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    for index, row in enumerate(rows):
        if row.teacher is not None:
            tokens[index], logprobs[index] = row.teacher.tokens, row.teacher.logprobs
    return TopTokens(*(torch.from_numpy(each).to(device) for each in (tokens, logprobs)))


def _values(rows: tuple[Row, ...], shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """The rows' named numbers, `[B, S]` each; rows of padding have zeros."""
    values = {}
    for name in rows[0].values if rows else ():
        values_BS = torch.zeros(shape, dtype=torch.float32)
        for index, row in enumerate(rows):
            values_BS[index] = torch.from_numpy(row.values[name])
        values[name] = values_BS.to(device)
    return values


def _apply_weights(rows: tuple[Row, ...], targets_BS: Tensor) -> Tensor | None:
    """Ignore targets of weight 0; the weights `[B, S]` fp32 if others than 0 and 1 occur."""
    weights_BS = torch.zeros(targets_BS.shape, dtype=torch.float32)
    for index, row in enumerate(rows):
        weights_BS[index] = torch.from_numpy(row.weights)
    targets_BS[weights_BS == 0] = IGNORED
    return None if bool(((weights_BS == 0) | (weights_BS == 1)).all()) else weights_BS
