"""Splits a program's output into lines as a terminal shows them.

Pure. Does not depend on files.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_LINE = 8192  # bytes; a longer line is split


def complete_length(data: bytes, *, final: bool, full: bool) -> int:
    """How many bytes of `data` form complete lines.

    `final`: nothing follows; `full`: `data` fills the reader's buffer, so a line without an end
    in it is cut, behind what a carriage return has already overwritten.
    """
    if final and not full:
        return len(data)
    complete = data.rfind(b"\n") + 1
    if complete or not full:
        return complete
    return _last_overwrite(data) or len(data)


def lines(data: bytes) -> Iterator[tuple[int, str]]:
    """`(end, text)` of each line: its end in `data` and what is left after its carriage returns."""
    end = 0
    for line in data.split(b"\n"):
        start, end = end, min(len(data), end + len(line) + 1)
        if end == start:
            return  # the empty rest behind the last line end
        shown = visible(line)
        if len(shown) <= LONGEST_LINE:
            yield end, _text(shown)
            continue
        before = start + max(0, line.find(shown))
        for at in range(0, len(shown), LONGEST_LINE):
            last = at + LONGEST_LINE >= len(shown)
            yield end if last else before + at + LONGEST_LINE, _text(shown[at : at + LONGEST_LINE])


def visible(line: bytes) -> bytes:
    """The text after the last carriage return that text follows."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def _last_overwrite(data: bytes) -> int:
    """Where the text begins that overwrites all before it; 0 if nothing is overwritten."""
    return data.rstrip(b"\r").rfind(b"\r") + 1


def _text(shown: bytes) -> str:
    return shown.decode("utf-8", "replace").replace("\x00", "�")
