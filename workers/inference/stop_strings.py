"""An answer's text while it grows, and whether a stop string is in it.

Knows ids and their decoding; knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # what a decoder makes of the first bytes of a character
_LONGEST_CHARACTER = 4  # bytes, so ids: what is no character by then will never be one


class GrowingText:
    """`text` of the ids so far, without the end of it that later ids may still change.

    Each id is decoded with the few before it, since decoders join neighbours (a space before a
    word, bytes of one
    character); the cost of an id does not grow with the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.text = ""
        self._decode, self._stops = decode, tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._ids: list[int] = []  # since the settled text's last part, which gives the context
        self._settled = 0

    def add(self, token: int) -> bool:
        """Whether a stop string is in the text with this id."""
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._settled]), self._decode(self._ids)
        waits = now.endswith(_UNFINISHED) and len(self._ids) - self._settled < _LONGEST_CHARACTER
        if len(now) <= len(before) or waits:
            return False
        fresh = now[len(before) :]
        self.text += fresh
        del self._ids[: self._settled]
        self._settled = len(self._ids)
        start = max(0, len(self.text) - len(fresh) - self._longest + 1)
        return any(self.text.find(stop, start) >= 0 for stop in self._stops)


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the earliest stop string in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))]
