"""A step plan as plain integers: tokens, positions and cache slots, all that a rank needs.

Does not depend on tensors; small enough to send to other ranks in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from workers.inference.request import Request
from workers.inference.scheduling.step_plan import StepPlan

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The batch of a step, its sequences' query tokens concatenated.

    Per token: `tokens`, `positions`, and the cache `slots` that keys and values are written to.
    Per sequence: the block `table`, `context_lens` (with this step's tokens), `query_ends`, and
    `adapter_slots` (-1: no adapter), which is empty if no sequence has one.
    `logit_indices` are the tokens that get logits. `swap_outs`, `swap_ins` and `copies` come first.
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    logit_indices: list[int]
    table: list[list[int]]
    context_lens: list[int]
    query_ends: list[int]
    swap_outs: Pairs
    swap_ins: Pairs
    copies: Pairs
    adapter_slots: list[int] = field(default_factory=list)

    @property
    def max_query_len(self) -> int:
        """Query tokens of the longest sequence."""
        return max(
            end - start for start, end in zip([0, *self.query_ends], self.query_ends, strict=False)
        )


def build_step_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """The integers of a plan with at least one scheduled request."""
    scheduled = plan.scheduled
    ends = list(accumulate(part.count for part in scheduled))
    width = max(len(part.request.blocks) for part in scheduled)
    positions = [
        position for part in scheduled for position in range(part.start, part.start + part.count)
    ]
    slots = [
        part.request.blocks[position // block_size] * block_size + position % block_size
        for part in scheduled
        for position in range(part.start, part.start + part.count)
    ]
    return StepInputs(
        tokens=[token for part in scheduled for token in part.ids],
        positions=positions,
        slots=slots,
        logit_indices=[
            index
            for end, part in zip(ends, scheduled, strict=True)
            for index in range(end - part.rows, end)
        ],
        table=[_table_row(part.request, width) for part in scheduled],
        context_lens=[part.start + part.count for part in scheduled],
        query_ends=ends,
        swap_outs=list(plan.swap_outs),
        swap_ins=list(plan.swap_ins),
        copies=[part.copy for part in scheduled if part.copy is not None],
        adapter_slots=_adapter_slots(plan),
    )


def _adapter_slots(plan: StepPlan) -> list[int]:
    adapters = [part.request.adapter for part in plan.scheduled]
    if not any(adapters):
        return []
    return [-1 if each is None or each.slot is None else each.slot for each in adapters]


def _table_row(request: Request, width: int) -> list[int]:
    """Its blocks; 0 stands for blocks that no query reads (freed, or past its end)."""
    blocks = request.blocks[request.freed_blocks :]
    return [0] * request.freed_blocks + blocks + [0] * (width - request.freed_blocks - len(blocks))
