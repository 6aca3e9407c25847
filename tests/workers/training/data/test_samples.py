"""Samples as functions of the global index: order, shares of sources, documents; and batches cut
from them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.runtime.exit_codes import UserError
from workers.training.data.mixture import Mixture
from workers.training.data.samples import Samples
from workers.training.data.sources import Source
from workers.training.data.stream import Stream
from workers.training.parallel.batch_sharding import (
    IGNORED,
    Microbatch,
    load_microbatch,
    microbatches_for,
)


def samples(
    *lengths: int, weights: tuple[float, ...] = (), shuffle: bool = True, **more: Any
) -> Samples:
    """Sources of that many tokens, counted on from source to source."""
    sources, first = [], 0
    for number, length in enumerate(lengths):
        stream = Stream([np.arange(first, first + length, dtype=np.uint16)])
        sources.append(Source(f"s{number}", stream, weights[number] if weights else 1.0))
        first += length
    return Samples(sources, **{"seq_len": 4, "vocab": first, "seed": 1, "shuffle": shuffle, **more})


def test_an_epoch_sees_every_window_once_in_another_order() -> None:
    result = samples(41)
    epochs = [[int(result.window(epoch * 10 + i)[0]) for i in range(10)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 40, 4))
    assert epochs[0] != epochs[1]
    assert result.window(3).tolist() == samples(41).window(3).tolist()
    assert [result.window(i)[0] for i in range(10)] == epochs[0], (
        "going back is the same as going on"
    )
    assert [samples(41, seed=2).window(i)[0] for i in range(10)] != epochs[0]


def test_each_source_has_its_share_and_epochs_of_its_own() -> None:
    result = samples(9, 401, weights=(3, 1))
    seen = [int(result.window(index)[0]) for index in range(80)]
    small, large = [one for one in seen if one < 9], [one for one in seen if one >= 9]
    assert len(small) == 60 and Counter(small) == {0: 30, 4: 30}, (
        "repeated as often as its weight wants"
    )
    assert len(set(large)) == 20, "nothing twice before all was seen"
    assert [result.source(index) for index in range(80)] == [int(one >= 9) for one in seen]
    backwards = samples(9, 401, weights=(3, 1))
    assert [int(backwards.window(index)[0]) for index in reversed(range(80))] == seen[::-1]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(0, 30_000))
def test_any_beginning_of_a_mixture_has_the_shares(weights: list[float], index: int) -> None:
    mixture = Mixture(weights)
    places = [mixture.locate(i) for i in range(mixture.period)]
    for source, weight in enumerate(weights):
        turns = [i for i, (taken, _) in enumerate(places) if taken == source]
        assert [places[i][1] for i in turns] == list(range(len(turns))), (
            "each sample of a source once, in order"
        )
        share = len(turns) / mixture.period
        assert share == pytest.approx(weight / sum(weights), abs=(len(weights) + 1) / 10_000)
        before = sum(1 for i in turns if i < index % mixture.period)
        assert abs(before - share * (index % mixture.period)) <= len(weights), "evenly spread"
    source, number = mixture.locate(index)
    assert (
        number
        == index // mixture.period * mixture.counts[source] + places[index % mixture.period][1]
    )


def test_what_is_too_short_is_named() -> None:
    with pytest.raises(
        UserError,
        match=r"^data of s1: 4 tokens are shorter than one sequence of 4 \+ 1\. .* seq_len 3",
    ):
        samples(9, 4)
    with pytest.raises(UserError, match=r"^data: 4 tokens are shorter"):
        samples(4)
    with pytest.raises(
        UserError, match="token id 40 near token 36 is outside the model's vocabulary of 40"
    ):
        samples(41, vocab=40, shuffle=False).window(9)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_blocks_cover_a_batch_once_under_any_dp(
    count: int, micro: int, dp: int, first: int
) -> None:
    by_rank = [
        microbatches_for(first, count, micro_batch_size=micro, dp=dp, rank=rank)
        for rank in range(dp)
    ]
    assert len({len(blocks) for blocks in by_rank}) == 1, "ranks step together"
    covered = [
        block.first + i for blocks in by_rank for block in blocks for i in range(block.count)
    ]
    assert sorted(covered) == list(range(first, first + count))
    assert all(block.count + block.missing == micro for blocks in by_rank for block in blocks)
    alone = microbatches_for(first, count, micro_batch_size=micro, dp=1, rank=0)
    spread = sorted((b for blocks in by_rank for b in blocks if b.count), key=lambda b: b.first)
    assert spread == [b for b in alone if b.count], (
        "the same groups, so that seeds by group are the same"
    )


def test_ranks_see_the_same_batches_under_any_dp_and_after_a_resume() -> None:
    cpu = torch.device("cpu")

    def batch(result: Samples, first: int, dp: int) -> list[list[int]]:
        rows = []
        for rank in range(dp):
            for block in microbatches_for(first, 8, micro_batch_size=2, dp=dp, rank=rank):
                rows += list(
                    zip(
                        (block.first + i for i in range(2)),
                        load_microbatch(result, block, cpu).inputs,
                        strict=True,
                    )
                )
        return [row.tolist() for _, row in sorted(rows, key=lambda pair: pair[0])]

    straight = samples(41, 23, weights=(0.7, 0.3))
    seen = [batch(straight, step * 8, 1) for step in range(12)]
    for dp in (2, 4):
        assert [batch(straight, step * 8, dp) for step in range(12)] == seen
    resumed = samples(41, 23, weights=(0.7, 0.3))  # depends on the count of samples only
    assert [batch(resumed, step * 8, 4 if step < 9 else 2) for step in range(7, 12)] == seen[7:]


def test_padding_is_not_learned_from() -> None:
    batch = load_microbatch(
        samples(41, shuffle=False), Microbatch(2, 1, missing=1), torch.device("cpu")
    )
    assert batch.inputs.tolist()[0] == [8, 9, 10, 11]
    assert batch.targets.tolist() == [[9, 10, 11, 12], [IGNORED] * 4]
    assert batch.documents is None, "it was not asked where they begin"


def test_batches_report_where_documents_begin_under_any_dp_and_after_a_resume() -> None:
    """By recorded places, by the token that ends documents, and of a source that knows none;
    padding is one.
    """
    ids = np.arange(41, dtype=np.uint16)
    begins = [0, 3, 8, 9, 10, 21, 40]
    ended = np.where(np.isin(ids, begins[1:]), 7, 6).astype(np.uint16)
    streams = [
        Stream([ids[:20], ids[20:]], starts=np.array(begins)),
        Stream([ended], document_end=7),
        Stream([ids]),
    ]

    def reported(stream: Stream, first: int, dp: int) -> dict[int, list[int]]:
        result = Samples(
            [Source("s", stream)], seq_len=4, vocab=41, seed=1, shuffle=True, masked=True
        )
        rows: dict[int, list[int]] = {}
        for rank in range(dp):
            for block in microbatches_for(first, 10, micro_batch_size=3, dp=dp, rank=rank):
                documents = load_microbatch(result, block, torch.device("cpu")).documents
                assert documents is not None and len(documents.starts) == 3
                assert all(list(row) == [0] for row in documents.starts[block.count :])
                for row in range(block.count):
                    place = int(samples(41).window(block.first + row)[0])
                    rows[place] = list(documents.starts[row])
        return rows

    expected = {
        place: [0, *(b - place for b in begins if place < b < place + 4)]
        for place in range(0, 40, 4)
    }
    for dp in (1, 2, 4):
        for first in (0, 10):
            assert reported(streams[0], first, dp) == reported(streams[1], first, dp) == expected
            assert reported(streams[2], first, dp) == {place: [0] for place in expected}
