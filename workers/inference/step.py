"""What one step of the engine computes: a slice of tokens for each request in it, and the copies of
blocks before.

Plain data; `scheduler` plans it, `runner` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.inference.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `start` to `start + count` of a request, drafted ones last; of the last `wants` the
    logits are wanted.

    `copy` is a block's contents to be copied first: from, to.
    """

    request: Request
    start: int
    count: int
    copy: tuple[int, int] | None = None
    wants: int = 0

    @property
    def samples(self) -> bool:
        """Whether the slice ends where the request's next token is wanted."""
        return self.wants > 0

    @property
    def drafts(self) -> int:
        """How many of its tokens are drafted: they become the request's own if they are accepted."""
        return max(0, self.wants - 1)

    @property
    def ids(self) -> list[int]:
        """The tokens to be computed."""
        known, draft = self.request.tokens[self.start : self.start + self.count], self.request.draft
        first = max(0, self.start - len(self.request.tokens))
        return known + draft[first : first + self.count - len(known)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: decodes first, each request at most once. All copies come before all
    writes: first blocks
    to CPU memory (`outs`: block, place there), then blocks from it (`ins`: place, block), then
    those of the slices.
    """

    slices: tuple[Slice, ...]
    preempted: tuple[Request, ...] = ()
    outs: tuple[tuple[int, int], ...] = ()
    ins: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(each.count for each in self.slices)
