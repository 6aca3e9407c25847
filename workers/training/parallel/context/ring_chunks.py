"""Which positions of a sequence each rank of a ring has, and which tiles of attention are visible.

Integers only. Does not depend on tensors or processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from workers.models.layers.documents import attention_chunks


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Slices of a rank's queries and of a rank's keys in which every query sees some key.

    `kind`: "full", every query sees every key; "causal", equally many of both, query i sees key
    j <= i; "window", query i sees key j with 0 <= i + ahead - j < window; "documents", equally many
    of both, "causal" within the documents that begin at `starts`.
    """

    queries: slice
    keys: slice
    kind: str
    ahead: int = 0
    starts: tuple[int, ...] = ()


def rank_spans(length: int, size: int, rank: int) -> tuple[range, ...]:
    """Positions, of `length`, of `rank` of `size`: chunks rank and 2 · size - 1 - rank of 2 · size.

    An early and a late chunk give all ranks the same causal work (Llama 3, arXiv 2407.21783,
    section 3.3.2). If the chunks cannot be equal, each of the first `size` has one position more
    than each of the last, so that every rank has length / size. Raises ValueError if `size` does
    not divide `length`.
    """
    share, rest = divmod(length, size)
    if rest:
        raise ValueError(
            f"{length} positions do not divide over {size} ranks. Use {length - rest} or "
            f"{length + size - rest}."
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
    """Causal attention between two ranks' spans in as few tiles as possible, without fully masked
    ones.

    `starts`: where the sequence's documents begin, including 0; attention stays within a document.
    """
    if queries == keys and (window is None or window > queries[-1][-1] - queries[0][0]):
        return _own_tiles(queries, starts)
    if len(starts) > 1:
        return _document_tiles(queries, keys, window, starts)
    tiles: list[AttentionTile] = []
    query_at = 0
    for query in queries:
        key_at = 0
        for key in keys:
            tile = _between(query, key, query_at, key_at, window)
            if tile is not None:
                tiles.append(tile)
            key_at += len(key)
        query_at += len(query)
    return _merged(tiles)


def _own_tiles(spans: tuple[range, ...], starts: Sequence[int]) -> list[AttentionTile]:
    """A rank's positions with themselves: positions and their documents are in order."""
    places, local = [], 0
    last = -1  # the document of the position before
    for span in spans:
        first = bisect_right(starts, span.start) - 1
        if first != last:
            places.append(local)
        inside = starts[first + 1 : bisect_right(starts, span[-1])]
        places += [local + start - span.start for start in inside]
        last, local = first + len(inside), local + len(span)
    return [
        AttentionTile(
            each.queries,
            each.keys,
            "documents" if len(each.starts) > 1 else "causal",
            starts=each.starts,
        )
        for each in attention_chunks([*places, local], None)
    ]


def _document_tiles(
    queries: tuple[range, ...], keys: tuple[range, ...], window: int | None, starts: Sequence[int]
) -> list[AttentionTile]:
    """Tiles of each document's queries and keys."""
    tiles = []
    query_at = 0
    for query in queries:
        key_at = 0
        for key in keys:
            # from the document of the first query; an earlier span of keys can only end with it
            for index in range(
                bisect_right(starts, query.start) - 1, bisect_right(starts, query[-1])
            ):
                stop = starts[index + 1] if index + 1 < len(starts) else query.stop
                own = range(max(query.start, starts[index]), min(query.stop, stop))
                theirs = range(max(key.start, starts[index]), min(key.stop, stop))
                if theirs:
                    at = query_at + own.start - query.start, key_at + theirs.start - key.start
                    tile = _between(own, theirs, *at, window)
                    if tile is not None:
                        tiles.append(tile)
                if key != query:
                    break
            key_at += len(key)
        query_at += len(query)
    return tiles


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
    if window is not None:  # only keys that some query sees, and only queries that see a key
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


def _merged(tiles: list[AttentionTile]) -> list[AttentionTile]:
    """Merge neighboring full tiles: one kernel call instead of two and a merge."""
    merged: list[AttentionTile] = []
    for tile in tiles:
        last = merged[-1] if merged else None
        if last is not None and last.kind == tile.kind == "full":
            if last.queries == tile.queries and last.keys.stop == tile.keys.start:
                merged[-1] = AttentionTile(
                    tile.queries, slice(last.keys.start, tile.keys.stop), "full"
                )
                continue
            if last.keys == tile.keys and last.queries.stop == tile.queries.start:
                merged[-1] = AttentionTile(
                    slice(last.queries.start, tile.queries.stop), tile.keys, "full"
                )
                continue
        merged.append(tile)
    return merged
