"""Detects the level of a log line from its words. Pure functions."""

from __future__ import annotations

import re
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
WIDTH: Final = 400  # characters shown per line

_ERROR = re.compile(
    r"\b(error|exception|traceback|fatal|critical|out of "
    r"memory|sigkill|sigsegv|aborted)\b|\w+(Error|Exception)\b",
    re.I,
)
_WARNING = re.compile(r"\b(warn|warning|deprecat\w+)\b|\w+Warning\b", re.I)
_DEBUG = re.compile(r"\b(debug|trace)\b", re.I)


def level(text: str) -> str:
    """Return debug, info, warning or error."""
    head = text[:WIDTH]
    return (
        "error"
        if _ERROR.search(head)
        else "warning"
        if _WARNING.search(head)
        else "debug"
        if _DEBUG.search(head)
        else "info"
    )
