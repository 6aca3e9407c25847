"""Equal shares of a step's paged attention for a fixed number of programs, computed on the device.

An item is a tile of query rows of one sequence; its cost is the number of key blocks that the rows
see. Programs take equal ranges of the concatenated key blocks of all items and heads, so a long
sequence is split over as many programs as its cost needs (stream-K, arXiv 2301.03598; FlashInfer's
scheduler, arXiv 2501.01005). Does not depend on heads or arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import runtime
from kernels.jit import cdiv
from kernels.paged_kv.page_plan import PagePlan

MIN_KEYS = 256
"""A program takes at least this many keys: fewer cost more to merge than they save."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one launch: those with more than `above` and at most `up_to` query rows.

    A row is a query token of one of the `group` query heads that share a key head.
    """

    group: int
    above: int
    up_to: int


@dataclass(frozen=True, slots=True)
class WorkTable:
    """`sequences` and `tiles` [items]; `ends` [items] int32: key blocks up to each item's end.

    `items` is an upper bound that holds for all values of lengths and query counts; unused items
    are last and have no key blocks. `most_blocks` bounds the key blocks of one head.
    """

    sequences: Tensor
    tiles: Tensor
    ends: Tensor
    most_blocks: int

    @property
    def items(self) -> int:
        """Length of the table."""
        return len(self.ends)


def launches(plan: PagePlan, group: int, few_rows: int) -> list[Rows]:
    """One launch, or two if a ragged batch may mix decodes and long chunks.

    Decodes then keep their small tiles: `few_rows` query rows, or one token if that is more.
    """
    most, few = group * plan.queries, max(few_rows, group)
    if plan.cu is None or most <= few:
        return [Rows(group, 0, most)]
    return [Rows(group, 0, few), Rows(group, few, most)]


def work_table(
    plan: PagePlan, rows: Rows, *, block_m: int, block_n: int, window: int | None
) -> WorkTable:
    """The table for tiles of `block_m` query rows and blocks of `block_n` keys.

    Does not synchronize: a captured graph computes it again at each replay. Cached in the plan for
    the step's layers, apart for calls inside and outside of a capture.
    """
    key = (rows, block_m, block_n, window, runtime.is_capturing(plan.lens))
    table: WorkTable | None = plan.cached_work.get(key)
    if table is None:
        table = plan.cached_work[key] = _build(plan, rows, block_m, block_n, window)
    return table


def _build(plan: PagePlan, rows: Rows, block_m: int, block_n: int, window: int | None) -> WorkTable:
    device, sequences = plan.lens.device, len(plan.lens)
    most_tiles = cdiv(rows.up_to, block_m)
    if plan.cu is None:
        counts = torch.full((sequences,), plan.queries, device=device)
        items = sequences * most_tiles
    else:
        counts = plan.cu[1:].long() - plan.cu[:-1]
        items = sequences * most_tiles
        if plan.tokens >= 0:
            items = min(items, plan.tokens * rows.group // block_m + sequences)
    lens = plan.lens.long().clamp(0, plan.capacity)
    row_counts = counts * rows.group
    chosen = (row_counts > rows.above) & (row_counts <= rows.up_to)
    tile_ends = torch.where(chosen, (row_counts + block_m - 1) // block_m, 0).cumsum(0)
    slot = torch.arange(items, device=device)
    sequence = torch.searchsorted(tile_ends, slot, right=True).clamp_(max=sequences - 1)
    tile = slot - torch.where(sequence > 0, tile_ends[sequence - 1], 0)
    count, length = counts[sequence], lens[sequence]
    newest = torch.minimum((tile * block_m + block_m - 1) // rows.group, count - 1)
    high = (length - count + newest + 1).clamp_(min=0)
    low = torch.zeros_like(high)
    if window is not None:
        oldest = tile * block_m // rows.group
        low = (length - count + oldest - window + 1).clamp_(min=0) // block_n * block_n
    # an item without keys writes zeros
    blocks = ((high - low + block_n - 1) // block_n).clamp_(min=1)
    blocks = torch.where(slot < tile_ends[-1], blocks, 0)
    longest = plan.longest if window is None else min(plan.longest, window + block_m + block_n)
    most_blocks = items * max(1, cdiv(longest, block_n))
    return WorkTable(sequence.int(), tile.int(), blocks.cumsum(0, dtype=torch.int32), most_blocks)
