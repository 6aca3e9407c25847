"""Checks and merges the configuration, summary and origin of a run. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from orchestrator.common.errors import invalid

MOST_BYTES: Final = 256_000
MOST_VALUES: Final = 2000
DEEPEST: Final = 10
LONGEST_NAME: Final = 200
DIFF_BYTES: Final = 1_000_000
REQUIREMENTS_BYTES: Final = 200_000
# fields of `program`: type and the most characters of each text
PROGRAM: Final[Mapping[str, tuple[type, int]]] = {
    "command": (list, 1000),
    "folder": (str, 4096),
    "host": (str, 255),
    "python": (str, 40),
    "commit": (str, 64),
    "branch": (str, 200),
    "remote": (str, 500),
    "dirty": (bool, 0),
}


def merged(stored: Mapping[str, Any], patch: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`stored` after a merge patch (RFC 7396): null removes a name. Raises 422 about `field`."""
    result = _merge(stored, patch, field, 1)
    if _leaves(result) > MOST_VALUES:
        raise invalid(field, f"it has more than {MOST_VALUES:,} values", "Record fewer values.")
    size = len(json.dumps(result, ensure_ascii=False).encode())
    if size > MOST_BYTES:
        hint = "Record long texts and tables as media (POST runs/{id}/media)."
        raise invalid(field, f"it has {size:,} bytes, at most {MOST_BYTES:,} are stored", hint)
    return result


def _merge(
    stored: Mapping[str, Any], patch: Mapping[str, Any], field: str, level: int
) -> dict[str, Any]:
    if level > DEEPEST:
        raise invalid(field, f"it has more than {DEEPEST} levels", "Use fewer nested objects.")
    result = dict(stored)
    for name, value in patch.items():
        if not 1 <= len(name) <= LONGEST_NAME or "\0" in name:
            shown = name[:40] + ("…" if len(name) > 40 else "")
            message = f"the name {shown!r} has {len(name)} characters"
            raise invalid(field, message, f"Shorten the name to at most {LONGEST_NAME} characters.")
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            before = result.get(name)
            own = before if isinstance(before, Mapping) else {}
            result[name] = _merge(own, value, f"{field}.{name}", level + 1)
        else:
            result[name] = _storable(value)
    return result


def _storable(value: Any) -> Any:
    """Numbers that JSON cannot represent as texts; no NUL, which PostgreSQL refuses."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, list):
        return [_storable(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name).replace("\0", ""): _storable(item) for name, item in value.items()}
    return value


def _leaves(values: Mapping[str, Any]) -> int:
    return sum(_leaves(item) if isinstance(item, Mapping) else 1 for item in values.values())


def checked_program(values: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of an origin. Raises 422 for an unknown field or a wrong type."""
    result: dict[str, Any] = {}
    for name, given in values.items():
        value: Any = given
        if name not in PROGRAM:
            raise invalid(
                f"program.{name}", "this field is not known", f"Use one of {', '.join(PROGRAM)}."
            )
        kind, longest = PROGRAM[name]
        is_right = isinstance(value, kind) and (
            not isinstance(value, list) or all(isinstance(part, str) for part in value)
        )
        if value is not None and not is_right:
            hint = {
                "list": "Use a list of texts.",
                "str": "Write a text.",
                "bool": "Use true or false.",
            }
            raise invalid(f"program.{name}", f"{value!r:.60} is not valid", hint[kind.__name__])
        if kind is list and value is not None:
            value = [str(part).replace("\0", "")[:longest] for part in list(value)[:1000]]
        elif kind is str and value is not None:
            value = value.replace("\0", "")[:longest]
        result[name] = value
    return result


def checked_text(text: str, field: str, most: int) -> str:
    """The text without NUL. Raises 422 if it is too long."""
    size = len(text.encode())
    if size > most:
        message = f"it has {size:,} bytes, at most {most:,} are stored"
        raise invalid(field, message, "Leave out generated files.")
    return text.replace("\0", "")


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """`{path: value}` of all leaves; lists are leaves."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{before}{name}.")
        else:
            result[f"{before}{name}"] = value
    return result
