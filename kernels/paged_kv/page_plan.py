"""The addresses of a step: queries and pages of each sequence, checked once for all layers.

Does not depend on heads or arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime

MAX_GROUPED_QUERIES = 16
"""Without a GPU, sequences with at most this many query tokens are computed together (decode,
verification); longer ones (prefill) one by one.
"""

MAX_PADDING_KEYS = 256
"""Padding keys that a group of sequences may contain: one more group costs about as much as this
many keys (measured on one core with 3 kv heads of 64, fp32: 50 us per group, 0.19 us per key).
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one gather: n of them with `queries` tokens each, and at most `length` keys.

    `tokens` [n · queries] index the query tokens, None if these are all, in order; `pages` [n · p]
    index the cache. No query sees the first `skip` keys of the first page. `visible` [n, queries,
    length] is False if a key is masked for a query; None if no key is masked, if `causal` describes
    the mask, or, above MAX_GROUPED_QUERIES queries, if it is computed as needed. `padding` [m]:
    gathered rows that may never have been written; they are zeroed.
    """

    sequences: int
    queries: int
    length: int
    skip: int
    tokens: Tensor | None
    pages: Tensor
    consecutive: int | None
    visible: Tensor | None
    padding: Tensor | None
    causal: bool


@dataclass(frozen=True)
class PagePlan:
    """The result of `plan_pages`, for every layer's `paged_attention` of the step.

    On a GPU it refers to `table`, `lens` and `cu`, not to their values: a captured graph may be
    replayed after these were rewritten, as long as no sequence has more tokens than `queries`. Make
    a plan per capture: `cached_work` holds the work tables of its step.
    """

    table: Tensor
    lens: Tensor
    cu: Tensor | None
    tokens: int
    queries: int
    page: int
    longest: int
    blocks: int
    _groups: dict[int | None, tuple[Group, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _scratch: dict[tuple[str, torch.dtype], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )
    cached_work: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def capacity(self) -> int:
        """Tokens that the table has room for in each sequence."""
        return self.table.shape[1] * self.page

    def check_tensors(self, table: Tensor, lens: Tensor, cu: Tensor | None) -> None:
        """Raises ValueError for other tensors than those that the plan was made from."""
        if (
            self.table is not table
            or self.lens is not lens
            or (cu is not None and self.cu is not cu)
        ):
            raise ValueError(
                "plan was made from another block_table, seq_lens or cu_q; call plan_pages again "
                "for this step."
            )

    def check_cache(self, blocks: int, block_size: int) -> None:
        """Raises ValueError for a cache that the plan does not fit: its table may name blocks that
        the cache lacks.
        """
        if self.page != block_size:
            raise ValueError(
                f"plan was made for blocks of {self.page} tokens; the cache has {block_size}."
            )
        if self.blocks > blocks:
            raise ValueError(
                f"plan was made for a cache of {self.blocks} blocks; this one has {blocks}."
            )

    def query_starts(self) -> Tensor:
        """`[B + 1]`: the first query token of each sequence, and the total."""
        if self.cu is not None:
            return self.cu
        return (
            torch.arange(len(self.lens) + 1, device=self.lens.device, dtype=torch.int32)
            * self.queries
        )

    def scratch(self, role: str, like: Tensor, rows: int, columns: int) -> Tensor:
        """Uninitialized `[rows, columns]`, the same memory for every layer.

        Fresh megabytes cost a CPU more in page faults than their copying (4.1 against 1.1 ms for 32
        sequences of 130 tokens).
        """
        size, key = rows * columns, (role, like.dtype)
        if key not in self._scratch or self._scratch[key].numel() < size:
            self._scratch[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._scratch[key][:size].view(rows, columns)

    def groups(self, window: int | None) -> tuple[Group, ...]:
        """How to gather pages if no kernel reads them in place, cached per window. Synchronizes
        with a GPU.
        """
        if window not in self._groups:
            self._groups[window] = tuple(_make_groups(self, window))
        return self._groups[window]


def plan_pages(
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    blocks: int,
    block_size: int,
    queries: int = 1,
    cu_q: Tensor | None = None,
    max_q: int | None = None,
    longest: int | None = None,
    tokens: int | None = None,
    check: bool = True,
) -> PagePlan:
    """Checks a step's addresses.

    `block_table` [B, pages] int: cache blocks of each sequence in order; entries past its length
    are ignored. `seq_lens` [B] int: tokens in the cache, including this step's. Each sequence has
    `queries` query tokens, the last ones of its length. For ragged batches, `cu_q` [B + 1] int
    contains the start of each sequence's tokens and their total, and `max_q` bounds the longest.
    `check=False` trusts the values and never synchronizes with the GPU, as graph capture requires;
    a wrong table then reads wrong memory. `longest`, the greatest length, and `tokens`, the total
    of query tokens, are then needed for the best split of work, if the caller knows them. Raises
    ValueError or TypeError.
    """
    checks.integer_dtype("block_table", block_table)
    checks.dims("block_table", block_table, 2)
    checks.integer_dtype("seq_lens", seq_lens)
    checks.shape("seq_lens", seq_lens, (block_table.shape[0],), "sequences of block_table")
    checks.same_device(block_table=block_table, seq_lens=seq_lens, cu_q=cu_q)
    checks.contiguous_last("block_table", block_table)
    checks.contiguous_last("seq_lens", seq_lens)
    for name, value, minimum in (
        ("blocks", blocks, 0),
        ("block_size", block_size, 1),
        ("queries", queries, 1),
    ):
        checks.integer(name, value, minimum)
    if max_q is not None:
        checks.integer("max_q", max_q, 0)
    sequences, width = block_table.shape
    stated_longest, stated_tokens = longest, tokens
    longest, tokens = width * block_size, sequences * queries
    if cu_q is not None:
        checks.integer_dtype("cu_q", cu_q)
        checks.shape("cu_q", cu_q, (sequences + 1,), "sequences + 1")
        checks.contiguous_last("cu_q", cu_q)
        if max_q is None and not check:
            raise ValueError(
                "cu_q without max_q needs check=True; pass max_q, the largest number of query "
                "tokens of "
                "a sequence."
            )
        queries, tokens = max_q or 0, -1
    if not check:
        longest = longest if stated_longest is None else stated_longest
        tokens = tokens if stated_tokens is None else stated_tokens
    elif not runtime.is_capturing(block_table):
        longest = _check_values(block_table, seq_lens, blocks, block_size)
        if cu_q is not None:
            queries, tokens = _check_starts(cu_q, max_q)
    return PagePlan(block_table, seq_lens, cu_q, tokens, queries, block_size, longest, blocks)


def _check_values(table: Tensor, lens: Tensor, blocks: int, page: int) -> int:
    """Returns the greatest length; rejects lengths beyond the table and used entries beyond the
    cache.
    """
    sequences, width = table.shape
    if sequences == 0:
        return 0
    column = torch.arange(width, device=table.device)
    used = column < ((lens + (page - 1)) // page).unsqueeze(1)
    bad = used & ((table < 0) | (table >= blocks))
    shortest, longest, bad_any = (
        int(x) for x in torch.stack([lens.min(), lens.max(), bad.any().to(lens.dtype)]).tolist()
    )
    if shortest < 0 or longest > width * page:
        at = int(lens.argmin() if shortest < 0 else lens.argmax())
        raise ValueError(
            f"seq_lens[{at}] is {int(lens[at])}; it must be in 0 to {width * page}, "
            f"the capacity of {width} blocks of {page}. Give the sequence more blocks."
        )
    if bad_any:
        row, position = (int(x) for x in bad.nonzero()[0])
        raise ValueError(
            f"block_table[{row}, {position}] is {int(table[row, position])}; the cache has blocks "
            "0 to "
            f"{blocks - 1}, "
            f"and a length of {int(lens[row])} uses this entry."
        )
    return longest


def _check_starts(cu: Tensor, max_queries: int | None) -> tuple[int, int]:
    query_starts: list[int] = cu.tolist()
    counts = [b - a for a, b in pairwise(query_starts)]
    if query_starts[0] != 0 or min(counts, default=0) < 0:
        raise ValueError(
            f"cu_q starts at {query_starts[0]} and its smallest step is {min(counts, default=0)}; "
            "it "
            "must rise from 0."
        )
    longest_query = max(counts, default=0)
    if max_queries is not None and longest_query > max_queries:
        raise ValueError(
            f"cu_q has a sequence of {longest_query} query tokens and max_q is {max_queries}."
        )
    return max_queries if max_queries is not None else longest_query, query_starts[-1]


def _make_groups(plan: PagePlan, window: int | None) -> list[Group]:
    lens: list[int] = plan.lens.tolist()
    query_starts: list[int] = plan.query_starts().tolist()
    # queries, keys, first key, sequence, first token
    pending: list[tuple[int, int, int, int, int]] = []
    for sequence, length in enumerate(lens):
        count = query_starts[sequence + 1] - query_starts[sequence]
        visible = min(count, length)  # earlier queries see no key
        if visible:
            low = 0 if window is None else max(0, length - visible + 1 - window)
            pending.append(
                (
                    visible,
                    length - low // plan.page * plan.page,
                    low,
                    sequence,
                    query_starts[sequence + 1] - visible,
                )
            )
    pending.sort(key=lambda w: (w[0], -w[1]))
    groups: list[Group] = []
    members: list[tuple[int, int, int, int, int]] = []
    padding_keys = 0
    for item in pending:
        padding_keys += members[0][1] - item[1] if members else 0
        if members and (
            item[0] != members[0][0]
            or item[0] > MAX_GROUPED_QUERIES
            or padding_keys > MAX_PADDING_KEYS
        ):
            groups.append(_make_group(plan, members, lens, window))
            members, padding_keys = [], 0
        members.append(item)
    if members:
        groups.append(_make_group(plan, members, lens, window))
    return groups


def _make_group(
    plan: PagePlan,
    members: list[tuple[int, int, int, int, int]],
    lens: list[int],
    window: int | None,
) -> Group:
    device, page = plan.table.device, plan.page
    queries, length = members[0][0], members[0][1]
    rows = torch.tensor([m[3] for m in members], device=device)
    firsts = torch.tensor([m[4] for m in members], device=device)
    tokens = (firsts.unsqueeze(1) + torch.arange(queries, device=device)).flatten()
    is_complete = len(tokens) == plan.tokens and bool(
        (tokens == torch.arange(plan.tokens, device=device)).all()
    )
    low_pages = torch.tensor([m[2] // page for m in members], device=device)
    # number of keys from the first page on
    key_counts = torch.tensor([m[1] for m in members], device=device)
    column = torch.arange(-(-length // page), device=device)
    used = column < ((key_counts + page - 1) // page).unsqueeze(1)
    position = (low_pages.unsqueeze(1) + column).clamp_(max=plan.table.shape[1] - 1)
    # positions past a shorter sequence's end read its own first page, whose keys are masked below
    ids = plan.table[rows].long().gather(1, position)
    ids = torch.where(used, ids, ids[:, :1])
    first = members[0]
    is_single = len(members) == 1
    skip = first[2] % page if is_single and queries == 1 else 0
    length -= skip
    visible: Tensor | None = None
    causal = (
        is_single
        and queries > 1
        and queries == lens[first[3]]
        and (window is None or window >= queries)
    )
    same_length = queries == 1 and all(m[1] == first[1] and m[2] % page == skip for m in members)
    if not causal and not same_length and queries <= MAX_GROUPED_QUERIES:
        visible = visible_keys(
            key_counts.unsqueeze(1) - queries + torch.arange(queries, device=device),
            length,
            skip,
            window,
        )
    page_ids: list[int] = ids[0].tolist() if is_single else []
    is_consecutive = bool(page_ids) and all(b - a == 1 for a, b in pairwise(page_ids))
    padding: Tensor | None = None
    if not is_single:
        row = torch.arange(ids.shape[1] * page, device=device)
        # Positions past a sequence's pages read its first page again, which is valid if that page
        # is full.
        end = torch.where(key_counts >= page, (key_counts + page - 1) // page * page, len(row))
        padding = (
            ((row >= key_counts.unsqueeze(1)) & (row < end.unsqueeze(1)))
            .flatten()
            .nonzero()
            .squeeze(1)
        )
    return Group(
        len(members),
        queries,
        length,
        skip,
        None if is_complete else tokens,
        ids.flatten(),
        page_ids[0] if is_consecutive else None,
        visible,
        padding,
        causal,
    )


def visible_keys(position: Tensor, length: int, skip: int, window: int | None) -> Tensor:
    """`[…, length]`: which keys, from `skip` on, the query at `position` `[…]` sees."""
    keys = torch.arange(length, device=position.device) + skip
    position = position.unsqueeze(-1)
    return keys <= position if window is None else (keys <= position) & (keys > position - window)
