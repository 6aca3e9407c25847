"""Positions of each rank and visible attention tiles, checked against the mask they represent."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import pytest
import torch

from workers.training.parallel.context.ring_chunks import rank_spans, visible_tiles

WINDOWS = (None, 1, 2, 3, 5, 7, 12, 30)


def visibility_by_tiles(queries, keys, window, starts=(0,)):
    """How often each query sees each key, according to the tiles of two ranks."""
    visibility = torch.zeros(sum(map(len, queries)), sum(map(len, keys)), dtype=torch.int64)
    for tile in visible_tiles(queries, keys, window, starts):
        tile_visibility = visibility[tile.queries, tile.keys]
        distance = (
            torch.arange(tile_visibility.shape[0])[:, None]
            + tile.ahead
            - torch.arange(tile_visibility.shape[1])[None, :]
        )
        visible = {
            "full": torch.ones_like(tile_visibility, dtype=torch.bool),
            "causal": distance >= 0,
            "window": (distance >= 0) & (distance < (window or 0)),
            "documents": (distance >= 0)
            & same_document(
                range(tile_visibility.shape[0]), range(tile_visibility.shape[1]), tile.starts
            ),
        }[tile.kind]
        assert tile.kind != "causal" or tile_visibility.shape[0] == tile_visibility.shape[1]
        assert visible.any(1).all() and tile_visibility.numel()
        tile_visibility += visible
    return visibility


def same_document(queries, keys, starts):
    of_query, of_key = (
        torch.tensor([bisect_right(starts, position) for position in positions])
        for positions in (queries, keys)
    )
    return of_query[:, None] == of_key[None, :]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("share", [1, 2, 3, 4, 7])
def test_tiles_of_all_ranks_form_the_causal_mask(size, share):
    length = size * share
    spans_by_rank = [rank_spans(length, size, rank) for rank in range(size)]
    positions_by_rank = [
        [position for span in spans for position in span] for spans in spans_by_rank
    ]
    assert sorted(itertools.chain(*positions_by_rank)) == list(range(length)) and {
        len(rank) for rank in positions_by_rank
    } == {share}
    for window in WINDOWS:
        for query_positions, queries in zip(positions_by_rank, spans_by_rank, strict=True):
            for key_positions, keys in zip(positions_by_rank, spans_by_rank, strict=True):
                distance = (
                    torch.tensor(query_positions)[:, None] - torch.tensor(key_positions)[None, :]
                )
                expected = (distance >= 0) & (distance < (window or length))
                assert torch.equal(visibility_by_tiles(queries, keys, window), expected.long()), (
                    window,
                    queries,
                    keys,
                )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("share", [1, 4, 9])
def test_tiles_respect_documents(size, share):
    length = size * share
    spans_by_rank = [rank_spans(length, size, rank) for rank in range(size)]
    positions_by_rank = [
        [position for span in spans for position in span] for spans in spans_by_rank
    ]
    generator = torch.Generator().manual_seed(length)
    for window, probability in itertools.product((None, 2, 6), (0.05, 0.3, 1.0)):
        is_start = torch.rand(length, generator=generator) < probability
        starts = sorted({0, *is_start.nonzero().flatten().tolist()})
        for query_positions, queries in zip(positions_by_rank, spans_by_rank, strict=True):
            for key_positions, keys in zip(positions_by_rank, spans_by_rank, strict=True):
                distance = (
                    torch.tensor(query_positions)[:, None] - torch.tensor(key_positions)[None, :]
                )
                expected = (
                    (distance >= 0)
                    & (distance < (window or length))
                    & same_document(query_positions, key_positions, starts)
                )
                visibility = visibility_by_tiles(queries, keys, window, starts)
                assert torch.equal(visibility, expected.long()), (window, queries, keys, starts)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_balanced_and_each_step_is_one_tile(size):
    spans_by_rank = [rank_spans(16 * size, size, rank) for rank in range(size)]
    work = []
    for queries in spans_by_rank:
        steps = [visible_tiles(queries, keys, None) for keys in spans_by_rank]
        assert all(len(step) == 1 for step in steps)
        pairs = sum(visibility_by_tiles(queries, keys, None).sum().item() for keys in spans_by_rank)
        work.append(pairs)
    assert len(set(work)) == 1


def test_indivisible_positions_are_refused():
    with pytest.raises(ValueError, match=r"17 positions do not divide over 4 ranks\. Use 16 or 20"):
        rank_spans(17, 4, 0)
