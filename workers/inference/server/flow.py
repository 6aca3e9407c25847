"""An answer's text as it may be shown so far: whole characters, and nothing of a stop string.

Knows ids and words; knows no JSON. What was shown is never taken back, and all of it together is
the answer's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.inference.sampling import Sampling
from workers.inference.stop_strings import GrowingText, until_stop


class Flow:
    """`add` ids, get the text that can be shown with them; `end` gives the rest.

    Without `decode` there is no text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, sampling: Sampling) -> None:
        self.ids: list[int] = []
        self._decode, self._stops = decode, sampling.stop
        self._ends = frozenset() if sampling.ignore_eos else frozenset(sampling.ends)
        self._growing = GrowingText(decode, ()) if decode is not None else None
        self._shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        self.ids += tokens
        if self._growing is None:
            return ""
        for token in tokens:
            if token not in self._ends:
                self._growing.add(token)
        text = self._growing.text
        return self._show(text[: _safe(text, self._stops)])

    def end(self) -> str:
        return self._show(self.text()) if self._decode is not None else ""

    def text(self) -> str:
        """Of all ids so far, up to a stop string."""
        return "" if self._decode is None else until_stop(self._decode(self.ids), self._stops)

    def _show(self, text: str) -> str:
        fresh, self._shown = text[self._shown :], max(self._shown, len(text))
        return fresh


def _safe(text: str, stops: Sequence[str]) -> int:
    """How much of the text no stop string can begin in, whatever comes after it."""
    end = len(until_stop(text, stops))
    for stop in stops:
        for length in range(min(len(stop) - 1, end), 0, -1):
            if text.endswith(stop[:length], 0, end):
                end -= length
                break
    return end
