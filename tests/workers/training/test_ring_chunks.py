"""Held positions and visible blocks against the mask they stand for."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import pytest
import torch

from workers.training.parallel.context.ring_chunks import rank_spans, visible_tiles

WINDOWS = (None, 1, 2, 3, 5, 7, 12, 30)


def seen_by_blocks(queries, keys, window, starts=(0,)):
    """How often each query sees each key, as the blocks of two ranks say."""
    seen = torch.zeros(sum(map(len, queries)), sum(map(len, keys)), dtype=torch.int64)
    for block in visible_tiles(queries, keys, window, starts):
        part = seen[block.queries, block.keys]
        distance = (
            torch.arange(part.shape[0])[:, None]
            + block.ahead
            - torch.arange(part.shape[1])[None, :]
        )
        sees = {
            "full": torch.ones_like(part, dtype=torch.bool),
            "causal": distance >= 0,
            "window": (distance >= 0) & (distance < (window or 0)),
            "documents": (distance >= 0)
            & same_document(range(part.shape[0]), range(part.shape[1]), block.starts),
        }[block.kind]
        assert block.kind != "causal" or part.shape[0] == part.shape[1]
        assert sees.any(1).all() and part.numel()
        part += sees
    return seen


def same_document(queries, keys, starts):
    of_query, of_key = (
        torch.tensor([bisect_right(starts, place) for place in some]) for some in (queries, keys)
    )
    return of_query[:, None] == of_key[None, :]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("share", [1, 2, 3, 4, 7])
def test_blocks_of_all_ranks_are_the_causal_mask(size, share):
    length = size * share
    held = [rank_spans(length, size, rank) for rank in range(size)]
    places = [[position for span in spans for position in span] for spans in held]
    assert sorted(itertools.chain(*places)) == list(range(length)) and {
        len(each) for each in places
    } == {share}
    for window in WINDOWS:
        for mine, queries in zip(places, held, strict=True):
            for theirs, keys in zip(places, held, strict=True):
                distance = torch.tensor(mine)[:, None] - torch.tensor(theirs)[None, :]
                expected = (distance >= 0) & (distance < (window or length))
                assert torch.equal(seen_by_blocks(queries, keys, window), expected.long()), (
                    window,
                    queries,
                    keys,
                )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("share", [1, 4, 9])
def test_blocks_keep_to_documents(size, share):
    length = size * share
    held = [rank_spans(length, size, rank) for rank in range(size)]
    places = [[position for span in spans for position in span] for spans in held]
    drawn = torch.Generator().manual_seed(length)
    for window, often in itertools.product((None, 2, 6), (0.05, 0.3, 1.0)):
        begins = torch.rand(length, generator=drawn) < often
        starts = sorted({0, *begins.nonzero().flatten().tolist()})
        for mine, queries in zip(places, held, strict=True):
            for theirs, keys in zip(places, held, strict=True):
                distance = torch.tensor(mine)[:, None] - torch.tensor(theirs)[None, :]
                expected = (
                    (distance >= 0)
                    & (distance < (window or length))
                    & same_document(mine, theirs, starts)
                )
                found = seen_by_blocks(queries, keys, window, starts)
                assert torch.equal(found, expected.long()), (window, queries, keys, starts)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_even_and_a_step_is_one_block(size):
    held = [rank_spans(16 * size, size, rank) for rank in range(size)]
    work = []
    for queries in held:
        steps = [visible_tiles(queries, keys, None) for keys in held]
        assert all(len(step) == 1 for step in steps)
        pairs = sum(seen_by_blocks(queries, keys, None).sum().item() for keys in held)
        work.append(pairs)
    assert len(set(work)) == 1


def test_positions_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="17 positions do not divide over 4 ranks; try 16 or 20"):
        rank_spans(17, 4, 0)
