"""Reads the calls of tools from an answer's text while it grows.

Text outside of calls can be shown at once; arguments are passed on as they come. Does not depend on
how answers are sent.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field

from workers.inference.server.http.tools import CALL, CALL_END, ToolUse

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)', re.DOTALL
)


@dataclass(slots=True)
class ToolCall:
    """One call: `arguments` is JSON text, incomplete while the answer grows."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New text of the call at `index`; `call` if the call begins with it."""

    index: int
    arguments: str
    call: ToolCall | None = None


class ToolCallReader:
    """`add` text; `content` is what is not in a call, `calls` are the calls so far."""

    def __init__(self, use: ToolUse) -> None:
        self.use = use
        self.content, self.calls = "", list[ToolCall]()
        self._rest = ""  # text that is not read yet
        self._in_call = use.choice != "auto"
        self._depth: int | None = None  # of brackets in arguments; None outside of them
        self._in_string = self._escaped = False
        if use.choice == "named":
            self.calls.append(ToolCall(str(use.name)))
            self._announced = False

    @property
    def finish(self) -> str:
        """The finish reason of an answer that stopped by itself."""
        return "tool_calls" if self.calls and self.use.choice != "named" else "stop"

    def add(self, text: str, *, end: bool = False) -> tuple[str, list[CallPiece]]:
        """New text to show, and pieces of calls; with `end` nothing follows."""
        if self.use.choice == "named":
            first = None if self._announced else self.calls[0]
            self._announced = True
            self.calls[0].arguments += text
            return "", [CallPiece(0, text, first)] if text or first else []
        self._rest += text
        shown, pieces = "", list[CallPiece]()
        while self._rest:
            before = len(self._rest), self._in_call, self._depth
            if not self._in_call:
                shown += self._outside(end=end)
            elif self._depth is None:
                pieces += self._head()
            else:
                pieces.append(self._arguments())
            if before == (len(self._rest), self._in_call, self._depth):
                break
        self.content += shown
        return shown, [piece for piece in pieces if piece.arguments or piece.call]

    def _outside(self, *, end: bool) -> str:
        """The text before the next call; without one, all that cannot begin its tag."""
        place = self._rest.find(CALL)
        if place >= 0:
            text, self._rest = self._rest[:place], self._rest[place + len(CALL) :]
            self._in_call = True
            return text if self.content or text.strip() else ""
        keep = 0
        if not end:
            keep = next(
                (size for size in range(len(CALL) - 1, 0, -1) if self._rest.endswith(CALL[:size])),
                0,
            )
            if self.calls and not self._rest.strip():
                return ""  # blanks between calls
        cut = len(self._rest) - keep
        text, self._rest = self._rest[:cut], self._rest[cut:]
        return "" if self.calls and not text.strip() else text

    def _head(self) -> list[CallPiece]:
        """The name of the next call; skips what is between calls."""
        rest = self._rest.lstrip(" \n\r\t[,]}" if self.use.choice == "required" else " \n\r\t}")
        if self.use.choice == "auto" and rest.startswith(CALL_END):
            self._rest, self._in_call = rest[len(CALL_END) :], False
            return []
        match = _HEAD.match(rest)
        if match is None:
            return []
        self._rest, self._depth = rest[match.end() :], 0
        self.calls.append(ToolCall(json.loads(match[1])))
        return [CallPiece(len(self.calls) - 1, "", self.calls[-1])]

    def _arguments(self) -> CallPiece:
        """Arguments up to the end of their value, or all of the text."""
        depth, end = self._depth or 0, len(self._rest)
        for place, letter in enumerate(self._rest):
            if self._in_string:
                self._escaped, closes = letter == "\\" and not self._escaped, not self._escaped
                self._in_string = not (letter == '"' and closes)
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                depth += 1
            elif letter in "}]":
                depth -= 1
                if depth == 0:
                    end = place + 1
                    break
        text, self._rest = self._rest[:end], self._rest[end:]
        self._depth = None if depth == 0 else depth
        self.calls[-1].arguments += text
        return CallPiece(len(self.calls) - 1, text)
