"""What a leader tells the others, as whole numbers: a step's work, a cache to make, ids to read. No
pickles.

Knows numbers; sending them is `team`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from workers.inference.work import Pairs, Work

IDLE, ROOM, CACHE, WORK, READ = 1, 2, 3, 4, 5  # kinds of messages, beside the end


def numbers_of(work: Work) -> list[int]:
    """Seven lengths, then what they are of."""
    width = len(work.table[0])
    pairs = (work.outs, work.ins, work.copies)
    lengths = [len(work.tokens), len(work.wanted), len(work.lens), width, *map(len, pairs)]
    return [
        *lengths,
        *work.tokens,
        *work.places,
        *work.slots,
        *work.wanted,
        *chain.from_iterable(work.table),
        *work.lens,
        *work.ends,
        *chain.from_iterable(chain.from_iterable(pairs)),
    ]


def work_from(numbers: Sequence[int]) -> Work:
    """Back from `numbers_of`."""
    tokens, wanted, slices, width, outs, ins, copies = numbers[:7]
    rest = iter(numbers[7:])
    return Work(
        tokens=_some(rest, tokens),
        places=_some(rest, tokens),
        slots=_some(rest, tokens),
        wanted=_some(rest, wanted),
        table=[_some(rest, width) for _ in range(slices)],
        lens=_some(rest, slices),
        ends=_some(rest, slices),
        outs=_pairs(rest, outs),
        ins=_pairs(rest, ins),
        copies=_pairs(rest, copies),
    )


def _some(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]


def _pairs(numbers: Iterator[int], count: int) -> Pairs:
    return [(next(numbers), next(numbers)) for _ in range(count)]
