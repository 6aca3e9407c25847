"""Which tokens stand in which sample, and which rank gets which sample: functions of the global sample index.

The index is the whole data state: any number of ranks sees the same global batches, and a resumed run goes on exactly.
Does not know where tokens come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.training.corpus import Tokens
from workers.training.exits import UserError

IGNORED = -100  # target that no loss counts; cross_entropy's default


class Samples:
    """Windows of `seq_len` + 1 tokens, back to back, in a seeded order that changes every epoch.

    Sample i of epoch e is window `permutation(seed, e)[i]`; `shuffle=False` keeps the text's order. Documents are
    packed without padding, and attention looks across their borders (GPT-2's and GPT-3's way).
    """

    def __init__(
        self, tokens: Tokens, *, seq_len: int, vocab: int, seed: int, shuffle: bool, name: str = "data"
    ) -> None:
        self.tokens, self.seq_len, self.vocab, self.seed, self.shuffle = tokens, seq_len, vocab, seed, shuffle
        self.name = name
        self.windows = (len(tokens) - 1) // seq_len
        if self.windows < 1:
            raise UserError(
                f"{name}: {len(tokens)} tokens are shorter than one sequence of {seq_len} + 1; "
                f"try more text, or seq_len {max(1, len(tokens) - 1)} or less"
            )
        self._order: tuple[int, np.ndarray] | None = None

    def window(self, index: int) -> np.ndarray:
        """Token ids of global sample `index`, `[seq_len + 1]`, int64.

        Raises UserError for ids outside the vocabulary.
        """
        epoch, place = divmod(index, self.windows)
        if self.shuffle:
            place = int(self._permutation(epoch)[place])
        start = place * self.seq_len
        found = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        largest = int(found.max())
        if largest >= self.vocab:
            raise UserError(
                f"{self.name}: token id {largest} near token {start} is outside the model's vocabulary of "
                f"{self.vocab}; try the tokenizer of this model, or vocab {largest + 1} or more"
            )
        return found

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order = epoch, generator.permutation(self.windows)
        return self._order[1]


@dataclass(frozen=True, slots=True)
class Block:
    """One micro-batch of one rank: `count` samples from global sample `first` on; `missing` more are only padding."""

    first: int
    count: int
    missing: int = 0


def blocks_of(first: int, samples: int, *, micro_batch_size: int, dp: int, rank: int) -> list[Block]:
    """The micro-batches of data-parallel `rank` in the batch of `samples` from `first` on.

    Micro-batch m of rank r holds samples (m · dp + r) · micro_batch_size onwards: the same groups whatever dp is. All
    ranks get equally many blocks; where samples run out, padding fills up, because sharded models step together.
    """
    rounds = -(-samples // (micro_batch_size * dp))
    found = []
    for index in range(rank, rounds * dp, dp):
        start = index * micro_batch_size
        count = max(0, min(micro_batch_size, samples - start))
        found.append(Block(first + start, count, micro_batch_size - count))
    return found


def tensors_of(samples: Samples, block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a block, `[micro_batch_size, seq_len]` each, int64 on `device`; padding targets IGNORED."""
    windows = np.zeros((block.count + block.missing, samples.seq_len + 1), dtype=np.int64)
    for row in range(block.count):
        windows[row] = samples.window(block.first + row)
    whole = torch.from_numpy(windows)
    inputs, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    targets[block.count :] = IGNORED
    if device.type == "cuda":
        return inputs.pin_memory().to(device, non_blocking=True), targets.pin_memory().to(device, non_blocking=True)
    return inputs, targets
