"""Paths in a cluster's tree of switches, such as `row-1/rack-3`."""

from __future__ import annotations

from typing import Final

MOST_PARTS: Final = 8
MOST_CHARACTERS: Final = 200


def path(text: str) -> str:
    """The path without empty parts and repeated spaces. Raises ValueError if it is too long."""
    parts = [part for each in text.split("/") if (part := " ".join(each.split()))]
    joined = "/".join(parts)
    if len(joined) > MOST_CHARACTERS or len(parts) > MOST_PARTS:
        raise ValueError(
            f"the topology path {joined[:60]!r} is too long: a path has at most {MOST_PARTS} parts "
            f"and {MOST_CHARACTERS} characters, such as row-1/rack-3"
        )
    return joined
