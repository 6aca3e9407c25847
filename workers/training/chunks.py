"""Which positions of a sequence each rank of a ring holds, and which blocks of two ranks' positions see each other.

Integers alone; does not know tensors or processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys, as places among those that their ranks hold, of which some query sees some key.

    `kind`: "full", every query sees every key; "causal", as many of both, query i sees key j <= i; "window", query i
    sees key j with 0 <= i + ahead - j < window. In each kind every query sees a key.
    """

    queries: slice
    keys: slice
    kind: str
    ahead: int = 0


def held_spans(length: int, size: int, rank: int) -> tuple[range, ...]:
    """Positions that `rank` of `size` holds of `length`: chunks rank and 2 · size - 1 - rank of 2 · size.

    A late chunk beside an early one gives all ranks the same causal work (Llama 3, arXiv 2407.21783, section 3.3.2).
    Where the chunks cannot be equal, each of the first `size` has one position more than each of the last, so that
    every rank still holds length / size. Raises ValueError where `size` does not divide `length`.
    """
    share, rest = divmod(length, size)
    if rest:
        raise ValueError(
            f"{length} positions do not divide over {size} ranks; try {length - rest} or {length + size - rest}"
        )
    if size == 1:
        return (range(length),)
    early, late = share - share // 2, share // 2
    second = size * early + (size - 1 - rank) * late
    spans = (range(rank * early, (rank + 1) * early), range(second, second + late))
    return tuple(span for span in spans if span)


def visible_blocks(queries: tuple[range, ...], keys: tuple[range, ...], window: int | None) -> list[Block]:
    """Causal attention between two ranks' spans in as few blocks as they allow; wholly masked ones are left out."""
    if queries == keys and (window is None or window > queries[-1][-1] - queries[0][0]):
        held = sum(map(len, queries))
        return [Block(slice(0, held), slice(0, held), "causal")]
    found: list[Block] = []
    query_at = 0
    for query in queries:
        key_at = 0
        for key in keys:
            block = _between(query, key, query_at, key_at, window)
            if block is not None:
                found.append(block)
            key_at += len(key)
        query_at += len(query)
    return _joined(found)


def _between(query: range, key: range, query_at: int, key_at: int, window: int | None) -> Block | None:
    if query == key:
        kind = "causal" if window is None or window >= len(query) else "window"
        return Block(slice(query_at, query_at + len(query)), slice(key_at, key_at + len(key)), kind)
    if key.start > query.start:
        return None
    if window is not None:  # only what some query still sees, and only the queries that see it
        first, last = max(key.start, query.start - window + 1), min(query.stop, key.stop - 1 + window)
        query_at, key_at = query_at, key_at + first - key.start
        query, key = range(query.start, last), range(first, key.stop)
        if not query or not key:
            return None
    ahead = query.start - key.start
    inside = window is None or query[-1] - key.start < window
    return Block(
        slice(query_at, query_at + len(query)),
        slice(key_at, key_at + len(key)),
        "full" if inside else "window",
        0 if inside else ahead,
    )


def _joined(blocks: list[Block]) -> list[Block]:
    """Neighbouring full blocks as one: one kernel call, and nothing to merge between them."""
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and last.kind == block.kind == "full":
            if last.queries == block.queries and last.keys.stop == block.keys.start:
                found[-1] = Block(block.queries, slice(last.keys.start, block.keys.stop), "full")
                continue
            if last.keys == block.keys and last.queries.stop == block.queries.start:
                found[-1] = Block(slice(last.queries.start, block.queries.stop), block.keys, "full")
                continue
        found.append(block)
    return found
