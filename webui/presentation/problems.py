"""Problems of a request as sentences: what is wrong, then what to do.

Does not depend on where a problem was detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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


def hint_sentence(hint: str) -> str:
    """Returns a hint as an imperative sentence."""
    hint = hint.rstrip(". ")
    first = hint.split(maxsplit=1)[0].rstrip(",:").lower()
    if first in _IMPERATIVES:
        return f"{hint[:1].upper()}{hint[1:]}."
    return _("Use %(values)s.") % {"values": hint}
