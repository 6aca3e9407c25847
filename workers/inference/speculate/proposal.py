"""What makes drafts, and what it gives beside them. Knows no way of making them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from workers.inference.request import Request
from workers.inference.scheduling.step_plan import ScheduledTokens


@dataclass(frozen=True, slots=True)
class Proposed:
    """`drawn_from` has for each request whose draft was drawn the probabilities of it, fp64
    `[drafts, V]`; a draft that
    is not there follows from the tokens before it alone. `late` are slices whose drafts could not
    be made.

    `passes` are the draft model's: tokens and seconds of each.
    """

    drawn_from: dict[Request, Tensor] = field(default_factory=dict)
    late: frozenset[Request] = frozenset()
    passes: tuple[tuple[int, float], ...] = ()


class Proposer(Protocol):
    """`room` is asked before a step is planned, `propose` once it is: with all its slices, and
    those to be drafted.

    One that `reads` requests' blocks says in `request.draft_computed` how many tokens of them it has read."""

    reads: bool

    def window(self, window: int | None) -> int | None:
        """How many tokens have to stay in the blocks, of which the model itself sees the last
        `window`.
        """

    def room(self, request: Request, most: int) -> int:
        """How many tokens it would draft, at most `most`."""

    def propose(self, scheduled: Sequence[ScheduledTokens], drafting: Sequence[ScheduledTokens]) -> Proposed:
        """Fill in `request.draft` of those that are drafting."""

    def forget(self, request: Request) -> None:
        """The request has ended."""
