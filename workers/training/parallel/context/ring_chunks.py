"""Which positions of a sequence each rank of a ring holds, and which blocks of two ranks' positions
see each other.

Integers alone; does not know tensors or processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from workers.models.layers.documents import attention_chunks


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Queries and keys, as places among those that their ranks hold, of which some query sees some
    key.

    `kind`: "full", every query sees every key; "causal", as many of both, query i sees key j <= i;
    "window", query i
    sees key j with 0 <= i + ahead - j < window; "documents", as many of both, "causal" within the
    documents that begin
    at `starts`. In each kind every query sees a key.
    """

    queries: slice
    keys: slice
    kind: str
    ahead: int = 0
    starts: tuple[int, ...] = ()


def held_spans(length: int, size: int, rank: int) -> tuple[range, ...]:
    """Positions that `rank` of `size` holds of `length`: chunks rank and 2 · size - 1 - rank of 2 ·
    size.

    A late chunk beside an early one gives all ranks the same causal work (Llama 3, arXiv
    2407.21783, section 3.3.2).
    Where the chunks cannot be equal, each of the first `size` has one position more than each of
    the last, so that
    every rank still holds length / size. Raises ValueError where `size` does not divide `length`.
    """
    share, rest = divmod(length, size)
    if rest:
        raise ValueError(
            f"{length} positions do not divide over {size} ranks; try {length - rest} or "
            f"{length + size - rest}"
        )
    if size == 1:
        return (range(length),)
    early, late = share - share // 2, share // 2
    second = size * early + (size - 1 - rank) * late
    spans = (range(rank * early, (rank + 1) * early), range(second, second + late))
    return tuple(span for span in spans if span)


def visible_tiles(
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    window: int | None,
    starts: Sequence[int] = (0,),
) -> list[AttentionTile]:
    """Causal attention between two ranks' spans in as few blocks as they allow; wholly masked ones
    are left out.

    `starts` are the places in the sequence where its documents begin, 0 among them: positions see
    their own alone.
    """
    if queries == keys and (window is None or window > queries[-1][-1] - queries[0][0]):
        return _of_held(queries, starts)
    if len(starts) > 1:
        return _of_documents(queries, keys, window, starts)
    found: list[AttentionTile] = []
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


def _of_held(spans: tuple[range, ...], starts: Sequence[int]) -> list[AttentionTile]:
    """What a rank holds, with itself: held positions are in order, and so are the documents that
    they are of.
    """
    places, held = [], 0
    last = -1  # the document of the position before
    for span in spans:
        first = bisect_right(starts, span.start) - 1
        if first != last:
            places.append(held)
        inside = starts[first + 1 : bisect_right(starts, span[-1])]
        places += [held + start - span.start for start in inside]
        last, held = first + len(inside), held + len(span)
    return [
        AttentionTile(
            each.queries,
            each.keys,
            "documents" if len(each.starts) > 1 else "causal",
            starts=each.starts,
        )
        for each in attention_chunks([*places, held], None)
    ]


def _of_documents(
    queries: tuple[range, ...], keys: tuple[range, ...], window: int | None, starts: Sequence[int]
) -> list[AttentionTile]:
    """Block by block of each document's queries with its keys."""
    found = []
    query_at = 0
    for query in queries:
        key_at = 0
        for key in keys:
            # from the document of the first query on; an earlier span of keys can only end with
            # that one
            for index in range(
                bisect_right(starts, query.start) - 1, bisect_right(starts, query[-1])
            ):
                stop = starts[index + 1] if index + 1 < len(starts) else query.stop
                own = range(max(query.start, starts[index]), min(query.stop, stop))
                theirs = range(max(key.start, starts[index]), min(key.stop, stop))
                if theirs:
                    at = query_at + own.start - query.start, key_at + theirs.start - key.start
                    block = _between(own, theirs, *at, window)
                    if block is not None:
                        found.append(block)
                if key != query:
                    break
            key_at += len(key)
        query_at += len(query)
    return found


def _between(
    query: range, key: range, query_at: int, key_at: int, window: int | None
) -> AttentionTile | None:
    if query == key:
        kind = "causal" if window is None or window >= len(query) else "window"
        return AttentionTile(
            slice(query_at, query_at + len(query)), slice(key_at, key_at + len(key)), kind
        )
    if key.start > query.start:
        return None
    if window is not None:  # only what some query still sees, and only the queries that see it
        first, last = (
            max(key.start, query.start - window + 1),
            min(query.stop, key.stop - 1 + window),
        )
        query_at, key_at = query_at, key_at + first - key.start
        query, key = range(query.start, last), range(first, key.stop)
        if not query or not key:
            return None
    ahead = query.start - key.start
    inside = window is None or query[-1] - key.start < window
    return AttentionTile(
        slice(query_at, query_at + len(query)),
        slice(key_at, key_at + len(key)),
        "full" if inside else "window",
        0 if inside else ahead,
    )


def _joined(blocks: list[AttentionTile]) -> list[AttentionTile]:
    """Neighbouring full blocks as one: one kernel call, and nothing to merge between them."""
    found: list[AttentionTile] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and last.kind == block.kind == "full":
            if last.queries == block.queries and last.keys.stop == block.keys.start:
                found[-1] = AttentionTile(
                    block.queries, slice(last.keys.start, block.keys.stop), "full"
                )
                continue
            if last.keys == block.keys and last.queries.stop == block.queries.start:
                found[-1] = AttentionTile(
                    slice(last.queries.start, block.queries.stop), block.keys, "full"
                )
                continue
        found.append(block)
    return found
