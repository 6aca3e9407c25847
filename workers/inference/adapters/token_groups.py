"""The tokens of a step by adapter slot.

Rows of a step are in ascending order of slot, those without an adapter last. Does not depend on
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Rows `first` to `first + count` of a step, which use the adapter in `slot`."""

    slot: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """All `groups` of a step, which have the first `total` rows.

    `uniform` are the first slot and the rows of each, if consecutive slots have equally many rows.
    `counts` `[slots]` int64 are the rows of each slot and `ends` int32 their sums, both on the
    model's device.
    """

    groups: tuple[Group, ...]
    total: int
    uniform: tuple[int, int] | None
    counts: Tensor
    ends: Tensor


def group_tokens(
    slots: Sequence[int], ends: Sequence[int], *, count: int, device: torch.device
) -> TokenGroups | None:
    """The groups of sequences with these `slots` (below 0: no adapter) and row `ends`.

    `count` is the number of slots. None if no sequence has an adapter.
    """
    groups: list[Group] = []
    first = 0
    for slot, end in zip(slots, ends, strict=True):
        if slot >= 0:
            if groups and groups[-1].slot == slot:
                groups[-1] = Group(slot, groups[-1].first, end - groups[-1].first)
            else:
                groups.append(Group(slot, first, end - first))
        first = end
    if not groups:
        return None
    counts = [0] * count
    for group in groups:
        counts[group.slot] = group.count
    return TokenGroups(
        tuple(groups),
        sum(counts),
        _uniform(groups),
        torch.tensor(counts, device=device),
        torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device),
    )


def _uniform(groups: Sequence[Group]) -> tuple[int, int] | None:
    first, rows = groups[0].slot, groups[0].count
    even = all(
        group.slot == first + place and group.count == rows for place, group in enumerate(groups)
    )
    return (first, rows) if even else None
