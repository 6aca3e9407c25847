"""The text of an answer that can be shown so far: complete characters, no part of a stop string.

Text that was shown is never taken back; all of it together is the answer's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.inference.sampling.parameters import SamplingParams
from workers.inference.text.stop_strings import IncrementalText, truncate_at_stop


class Detokenizer:
    """`add` ids to get the text that can be shown now; `end` returns the rest.

    Without `decode` there is no text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str] | None, sampling: SamplingParams
    ) -> None:
        self.ids: list[int] = []
        self._decode, self._stops = decode, sampling.stop
        self._ends = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
        self._growing = IncrementalText(decode, ()) if decode is not None else None
        self._shown = 0  # characters

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be shown with these tokens."""
        self.ids += tokens
        if self._growing is None:
            return ""
        for token in tokens:
            if token not in self._ends:
                self._growing.add(token)
        text = self._growing.text
        return self._show(text[: _safe_length(text, self._stops)])

    def end(self) -> str:
        """The rest of the text."""
        return self._show(self.text()) if self._decode is not None else ""

    def text(self) -> str:
        """The text of all ids so far, up to a stop string."""
        return "" if self._decode is None else truncate_at_stop(self._decode(self.ids), self._stops)

    def _show(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


def _safe_length(text: str, stops: Sequence[str]) -> int:
    """Characters before any stop string that the end of the text may begin."""
    end = len(truncate_at_stop(text, stops))
    for stop in stops:
        for length in range(min(len(stop) - 1, end), 0, -1):
            if text.endswith(stop[:length], 0, end):
                end -= length
                break
    return end
