"""Which rank gets which sample of a batch, and its tensors: functions of the global sample index.

Any number of ranks sees the same global batches. Does not know where samples come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.models.layers.documents import Documents
from workers.training.data.samples import Samples

IGNORED = -100  # target that no loss counts; cross_entropy's default


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One micro-batch of one rank: `count` samples from global sample `first` on; `missing` more
    are only padding.
    """

    first: int
    count: int
    missing: int = 0


def microbatches_for(
    first: int, samples: int, *, micro_batch_size: int, dp: int, rank: int
) -> list[Microbatch]:
    """The micro-batches of data-parallel `rank` in the batch of `samples` from `first` on.

    Micro-batch m of rank r holds samples (m · dp + r) · micro_batch_size onwards: the same groups
    whatever dp is. All
    ranks get equally many blocks; where samples run out, padding fills up, because sharded models
    step together.
    """
    rounds = -(-samples // (micro_batch_size * dp))
    found = []
    for index in range(rank, rounds * dp, dp):
        start = index * micro_batch_size
        count = max(0, min(micro_batch_size, samples - start))
        found.append(Microbatch(first + start, count, micro_batch_size - count))
    return found


def load_microbatch(
    samples: Samples, block: Microbatch, device: torch.device
) -> tuple[Tensor, Tensor, Documents | None]:
    """Inputs and targets of a block, `[micro_batch_size, seq_len]` each, int64 on `device`; padding
    targets IGNORED.

    And, of samples that tell them, where the inputs' documents begin.
    """
    windows = np.zeros((block.count + block.missing, samples.seq_len + 1), dtype=np.int64)
    starts = [[0]] * len(windows)
    for row in range(block.count):
        if samples.masked:
            windows[row], starts[row] = samples.packed(block.first + row)
        else:
            windows[row] = samples.window(block.first + row)
    documents = Documents(starts, samples.seq_len, device) if samples.masked else None
    whole = torch.from_numpy(windows)
    inputs, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    targets[block.count :] = IGNORED
    if device.type == "cuda":
        inputs, targets = (
            each.pin_memory().to(device, non_blocking=True) for each in (inputs, targets)
        )
    return inputs, targets, documents
