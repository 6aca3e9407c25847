"""The text of an answer while it grows, and whether it contains a stop string.

Depends on ids and a decode function only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # decoded from the first bytes of a character
_LONGEST_CHARACTER = 4  # bytes, so ids: longer sequences never become a character


class IncrementalText:
    """`text` of the ids so far, without the end that later ids may still change.

    Each id is decoded together with the few before it, because decoders join neighbors (a space
    before a word, bytes of one character). The cost per id does not grow with the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.text = ""
        self._decode, self._stops = decode, tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._ids: list[int] = []  # from the last settled ids on, which give the context
        self._settled = 0

    def add(self, token: int) -> bool:
        """Add an id; whether the text now contains a stop string."""
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._settled]), self._decode(self._ids)
        is_partial = (
            now.endswith(_UNFINISHED) and len(self._ids) - self._settled < _LONGEST_CHARACTER
        )
        if len(now) <= len(before) or is_partial:
            return False
        added = now[len(before) :]
        self.text += added
        del self._ids[: self._settled]
        self._settled = len(self._ids)
        start = max(0, len(self.text) - len(added) - self._longest + 1)
        return any(self.text.find(stop, start) >= 0 for stop in self._stops)


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the earliest stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]
