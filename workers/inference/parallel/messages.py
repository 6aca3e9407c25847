"""Encoding of the driver's messages as integers: step inputs, a cache to create, ids to read.

No pickles. Does not depend on how messages are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from workers.inference.scheduling.step_inputs import Pairs, StepInputs

# kinds of messages; END is the last one
END, IDLE, COUNT_BLOCKS, CACHE, STEP, READ = range(6)
# of adapters: a number and a file's digest and path in bytes; a number and a slot; a number
LOAD_ADAPTER, PLACE_ADAPTER, DROP_ADAPTER = range(6, 9)


def encode_step_inputs(inputs: StepInputs) -> list[int]:
    """Eight lengths, then the lists they belong to."""
    width = len(inputs.table[0])
    pairs = (inputs.swap_outs, inputs.swap_ins, inputs.copies)
    return [
        len(inputs.tokens),
        len(inputs.logit_indices),
        len(inputs.context_lens),
        width,
        *map(len, pairs),
        len(inputs.adapter_slots),
        *inputs.tokens,
        *inputs.positions,
        *inputs.slots,
        *inputs.logit_indices,
        *chain.from_iterable(inputs.table),
        *inputs.context_lens,
        *inputs.query_ends,
        *chain.from_iterable(chain.from_iterable(pairs)),
        *inputs.adapter_slots,
    ]


def decode_step_inputs(numbers: Sequence[int]) -> StepInputs:
    """The inverse of `encode_step_inputs`."""
    tokens, logits, slices, width, swap_outs, swap_ins, copies, adapters = numbers[:8]
    rest = iter(numbers[8:])
    return StepInputs(
        tokens=_take(rest, tokens),
        positions=_take(rest, tokens),
        slots=_take(rest, tokens),
        logit_indices=_take(rest, logits),
        table=[_take(rest, width) for _ in range(slices)],
        context_lens=_take(rest, slices),
        query_ends=_take(rest, slices),
        swap_outs=_take_pairs(rest, swap_outs),
        swap_ins=_take_pairs(rest, swap_ins),
        copies=_take_pairs(rest, copies),
        adapter_slots=_take(rest, adapters),
    )


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]


def _take_pairs(numbers: Iterator[int], count: int) -> Pairs:
    return [(next(numbers), next(numbers)) for _ in range(count)]
