"""Interface of draft proposers and their result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from workers.inference.request import Request
from workers.inference.scheduling.step_plan import ScheduledTokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """Result of `Proposer.propose`.

    `draft_probs`: fp64 `[drafts, V]` of each request whose draft was sampled; other drafts are
    deterministic. `late`: requests whose drafts could not be computed. `passes`: tokens and seconds
    of each pass of the draft model.
    """

    draft_probs: dict[Request, Tensor] = field(default_factory=dict)
    late: frozenset[Request] = frozenset()
    passes: tuple[tuple[int, float], ...] = ()


class Proposer(Protocol):
    """`count_drafts` is called before a step is planned, `propose` afterwards.

    A proposer that `reads` blocks stores in `request.draft_computed` how many tokens it has read.
    """

    reads: bool

    def window(self, window: int | None) -> int | None:
        """How many tokens must stay in the blocks if the model attends to the last `window`."""

    def count_drafts(self, request: Request, most: int) -> int:
        """How many tokens it would draft, at most `most`."""

    def propose(
        self, scheduled: Sequence[ScheduledTokens], drafting: Sequence[ScheduledTokens]
    ) -> Proposal:
        """Set `request.draft` of all parts in `drafting`; `scheduled` is the full step."""

    def forget(self, request: Request) -> None:
        """Drop a finished request."""
