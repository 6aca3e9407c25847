"""Problems of a request as sentences: what is wrong, then what to do.

Hints are imperative sentences at their source. Does not depend on where a problem was detected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple


def problem_text(problem: Mapping[str, str] | Any) -> str:
    """Returns message and hint of a problem (a mapping or an object) as sentences."""
    if isinstance(problem, Mapping):
        message, hint = str(problem["message"]), str(problem.get("hint") or "")
    else:
        message, hint = str(problem.message), str(problem.hint or "")
    message = message.rstrip(". ")
    if not hint:
        return f"{message}."
    return f"{message}. {hint}"


class Fix(NamedTuple):
    """A field of the spec and the value that a problem's hint proposes for it."""

    field: str
    value: str


# "Use 16.", "Use 8 or 16.", "Use tp 2.", "Use 2 devices."
_PROPOSAL: Final = re.compile(
    r"Use (?:(?P<name>[a-z_]+) )?(?:\d+ or )?(?P<value>\d+)(?P<devices> devices?)?\."
)


def fix_of(problem: Mapping[str, str] | Any, known: Collection[str]) -> Fix | None:
    """Returns the change that one click can make; None if the hint is not a value of a known field.

    Of two values the larger is proposed: a batch grows rather than shrinks.
    """
    if isinstance(problem, Mapping):
        field, hint = str(problem.get("field") or ""), str(problem.get("hint") or "")
    else:
        field, hint = str(problem.field), str(problem.hint or "")
    match = _PROPOSAL.fullmatch(hint.strip())
    if match is None:
        return None
    parent, _dot, _name = field.rpartition(".")
    if match["devices"]:
        field = "resources.devices"
    elif match["name"]:
        field = f"{parent}.{match['name']}" if parent else match["name"]
    return Fix(field, match["value"]) if field in known else None
