"""Problems of a request as sentences: what is wrong, then what to do.

Does not depend on where a problem was detected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from django.utils.translation import gettext as _

# first words of hints that are instructions already; other hints name values to use
_IMPERATIVE_WORDS: Final = """
add allow ask attach calculate call change check choose clone configure copy create define delete
disable divide drain enable enter export fetch fork give grant increase install join keep leave let
list log lower make match merge move name omit open pass paste pick place plan point press provide
put quantize raise read reduce register remove rename repeat replace request restart resume retry
revoke rotate run save select send set shorten shrink specify split start stop store submit train
turn undrain update upload wait write use
"""
_IMPERATIVES: Final = frozenset(_IMPERATIVE_WORDS.split())


def problem_text(problem: Mapping[str, str] | Any) -> str:
    """Returns message and hint of a problem (a mapping or an object) as sentences."""
    if isinstance(problem, Mapping):
        message, hint = str(problem["message"]), str(problem.get("hint") or "")
    else:
        message, hint = str(problem.message), str(problem.hint or "")
    message = message.rstrip(". ")
    if not hint:
        return f"{message}."
    return f"{message}. {hint_sentence(hint)}"


class Fix(NamedTuple):
    """A field of the spec and the value that a problem's hint proposes for it."""

    field: str
    value: str


# "16", "8 or 16", "tp 2", "2 devices"
_PROPOSAL: Final = re.compile(
    r"(?:(?P<name>[a-z_]+) )?(?:\d+ or )?(?P<value>\d+)(?P<devices> devices?)?"
)


def fix_of(problem: Mapping[str, str] | Any, known: Collection[str]) -> Fix | None:
    """Returns the change that one click can make; None if the hint is no value of a known field.

    Of two values the larger is proposed: a batch grows rather than shrinks.
    """
    if isinstance(problem, Mapping):
        field, hint = str(problem.get("field") or ""), str(problem.get("hint") or "")
    else:
        field, hint = str(problem.field), str(problem.hint or "")
    match = _PROPOSAL.fullmatch(hint.strip().rstrip("."))
    if match is None:
        return None
    parent, _dot, _name = field.rpartition(".")
    if match["devices"]:
        field = "resources.devices"
    elif match["name"]:
        field = f"{parent}.{match['name']}" if parent else match["name"]
    return Fix(field, match["value"]) if field in known else None


def hint_sentence(hint: str) -> str:
    """Returns a hint as an imperative sentence."""
    hint = hint.rstrip(". ")
    first = hint.split(maxsplit=1)[0].rstrip(",:").lower()
    if first in _IMPERATIVES:
        return f"{hint[:1].upper()}{hint[1:]}."
    return _("Use %(values)s.") % {"values": hint}
