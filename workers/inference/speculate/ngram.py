"""Drafts without a model: the tokens that followed the last occurrence of the text's final n-gram.

Prompt lookup decoding: pays if answers repeat their prompt (editing, summaries, code).
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.inference.request import Request
from workers.inference.scheduling.step_plan import ScheduledTokens
from workers.inference.speculate.proposal import Proposal

# single tokens are too common to predict what follows
_SHORTEST = 2


class NgramDraft:
    """Looks up the last `longest` tokens, then fewer; the cost per token is constant."""

    reads = False

    def __init__(self, longest: int) -> None:
        if longest < 1:
            raise ValueError(f"ngram is {longest}; it must be at least 1, try 3")
        self._sizes = range(longest, min(longest, _SHORTEST) - 1, -1)
        self._texts: dict[Request, _Text] = {}

    def window(self, window: int | None) -> int | None:
        """The model's own window."""
        return window

    def count_drafts(self, request: Request, most: int) -> int:
        """Look up the draft; its length."""
        text = self._texts.setdefault(request, _Text())
        request.draft = text.after(request.tokens, self._sizes, most)
        return len(request.draft)

    def propose(
        self, scheduled: Sequence[ScheduledTokens], drafting: Sequence[ScheduledTokens]
    ) -> Proposal:
        """Nothing to compute: `count_drafts` stored the draft."""
        return Proposal()

    def forget(self, request: Request) -> None:
        """Drop a finished request."""
        self._texts.pop(request, None)


class _Text:
    """Index of n-grams: the position after the last occurrence of each."""

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}
        self._indexed = 1

    def after(self, tokens: Sequence[int], sizes: range, most: int) -> list[int]:
        """At most `most` tokens that followed the last occurrence of the final n-gram."""
        for position in range(self._indexed, len(tokens)):
            for size in sizes:
                if size <= position:
                    self._positions[tuple(tokens[position - size : position])] = position
        self._indexed = max(self._indexed, len(tokens))
        for size in sizes:
            position = self._positions.get(tuple(tokens[-size:]), 0)
            if position:
                return list(tokens[position : position + most])
        return []
