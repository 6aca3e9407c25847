"""Drafts without a model: what followed the last time that the present end of the text stood in it.

Prompt look-up: it pays where answers repeat their prompt (editing, summaries, code). Knows tokens
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.inference.request import Request
from workers.inference.scheduling.step_plan import ScheduledTokens
from workers.inference.speculate.proposal import Proposed

# single tokens stand everywhere: what followed one of them is seldom what follows now
_SHORTEST = 2


class NgramDraft:
    """Ends of `longest` tokens are looked up, then shorter ones; the cost of a token does not grow
    with the text.
    """

    reads = False

    def __init__(self, longest: int) -> None:
        if longest < 1:
            raise ValueError(f"ngram is {longest}; an end of at least one token is wanted, try 3")
        self._sizes = range(longest, min(longest, _SHORTEST) - 1, -1)
        self._texts: dict[Request, _Text] = {}

    def window(self, window: int | None) -> int | None:
        return window

    def room(self, request: Request, most: int) -> int:
        text = self._texts.setdefault(request, _Text())
        request.draft = text.after(request.tokens, self._sizes, most)
        return len(request.draft)

    def propose(self, scheduled: Sequence[ScheduledTokens], drafting: Sequence[ScheduledTokens]) -> Proposed:
        return Proposed()

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)


class _Text:
    """Where each end stood last: the place of what followed it."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._known = 1

    def after(self, tokens: Sequence[int], sizes: range, most: int) -> list[int]:
        for place in range(self._known, len(tokens)):
            for size in sizes:
                if size <= place:
                    self._places[tuple(tokens[place - size : place])] = place
        self._known = max(self._known, len(tokens))
        for size in sizes:
            place = self._places.get(tuple(tokens[-size:]), 0)
            if place:
                return list(tokens[place : place + most])
        return []
