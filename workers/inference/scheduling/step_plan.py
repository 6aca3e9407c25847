"""The plan of one engine step: the tokens scheduled for each request, and block copies before them.

Plain data; `scheduler` makes it, `runner` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.inference.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens `start` to `start + count` of a request, drafted ones last.

    The last `num_logits` of them get logits for sampling, all of them if the prompt is `scored`.
    `copy` is a block copy (from, to) to do first.
    """

    request: Request
    start: int
    count: int
    copy: tuple[int, int] | None = None
    num_logits: int = 0
    scored: bool = False

    @property
    def rows(self) -> int:
        """Rows of logits."""
        return self.count if self.scored else self.num_logits

    @property
    def samples(self) -> bool:
        """Whether the request gets its next token after these."""
        return self.num_logits > 0

    @property
    def num_drafts(self) -> int:
        """How many are drafted; they become the request's own if they are accepted."""
        return max(0, self.num_logits - 1)

    @property
    def ids(self) -> list[int]:
        """The token ids to compute."""
        known, draft = self.request.tokens[self.start : self.start + self.count], self.request.draft
        first = max(0, self.start - len(self.request.tokens))
        return known + draft[first : first + self.count - len(known)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: decodes first, each request at most once.

    All copies come before all writes: `swap_outs` (block, slot in CPU memory), `swap_ins` (slot,
    block), then the copies of the scheduled requests.
    """

    scheduled: tuple[ScheduledTokens, ...]
    preempted: tuple[Request, ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Query tokens of the step."""
        return sum(part.count for part in self.scheduled)
