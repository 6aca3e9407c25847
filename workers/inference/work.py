"""A step plan as plain numbers: tokens, places and addresses, all that a rank needs to compute it.

Knows slices and blocks; knows no tensors. Small and quick to send.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from workers.inference.request import Request
from workers.inference.step import StepPlan

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Work:
    """`tokens` of all slices in a line, their `places` in their sequences, and the `slots` that
    keys and values go to;
    `wanted` are those whose logits are wanted. Of each slice its blocks (`table`), its tokens with
    this step's (`lens`)
    and where they end in the line (`ends`). Before all that: contents to CPU memory, back from it,
    and copied.
    """

    tokens: list[int]
    places: list[int]
    slots: list[int]
    wanted: list[int]
    table: list[list[int]]
    lens: list[int]
    ends: list[int]
    outs: Pairs
    ins: Pairs
    copies: Pairs

    @property
    def most(self) -> int:
        """Tokens of the longest slice."""
        return max(b - a for a, b in zip([0, *self.ends], self.ends, strict=False))


def work_of(plan: StepPlan, block_size: int) -> Work:
    slices = plan.slices
    ends = list(accumulate(each.count for each in slices))
    width = max(len(each.request.blocks) for each in slices)
    return Work(
        tokens=[token for each in slices for token in each.ids],
        places=[place for each in slices for place in range(each.start, each.start + each.count)],
        slots=[
            each.request.blocks[place // block_size] * block_size + place % block_size
            for each in slices
            for place in range(each.start, each.start + each.count)
        ],
        wanted=[
            place
            for end, each in zip(ends, slices, strict=True)
            for place in range(end - each.wants, end)
        ],
        table=[_addresses(each.request, width) for each in slices],
        lens=[each.start + each.count for each in slices],
        ends=ends,
        outs=list(plan.outs),
        ins=list(plan.ins),
        copies=[each.copy for each in slices if each.copy is not None],
    )


def _addresses(request: Request, width: int) -> list[int]:
    """Its blocks, and any in the places of those that no query sees: given back, or past its end."""
    held = request.blocks[request.gone :]
    return [0] * request.gone + held + [0] * (width - request.gone - len(held))
