"""Splits a global batch into micro-batches per rank, as a function of the global sample index.

Any number of ranks sees the same global batches. Does not depend on where samples come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.models.layers.documents import Documents
from workers.training.data.samples import Samples

IGNORED = -100  # target without loss; cross_entropy's default


@dataclass(frozen=True, slots=True)
class Microbatch:
    """`count` samples from global sample `first` on, and `missing` rows of padding."""

    first: int
    count: int
    missing: int = 0


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


def load_microbatch(
    samples: Samples, microbatch: Microbatch, device: torch.device
) -> tuple[Tensor, Tensor, Documents | None]:
    """Inputs and targets, `[micro_batch_size, seq_len]` int64 on `device`, padding targets IGNORED;
    and the inputs' documents, if samples have document boundaries.
    """
    windows = np.zeros((microbatch.count + microbatch.missing, samples.seq_len + 1), dtype=np.int64)
    starts = [[0]] * len(windows)
    for row in range(microbatch.count):
        if samples.masked:
            windows[row], starts[row] = samples.packed(microbatch.first + row)
        else:
            windows[row] = samples.window(microbatch.first + row)
    documents = Documents(starts, samples.seq_len, device) if samples.masked else None
    tokens = torch.from_numpy(windows)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    targets[microbatch.count :] = IGNORED
    if device.type == "cuda":
        inputs, targets = (
            each.pin_memory().to(device, non_blocking=True) for each in (inputs, targets)
        )
    return inputs, targets, documents
