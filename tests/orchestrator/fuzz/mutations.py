"""Random mutations of JSON messages and of their bytes; equal seeds give equal mutations."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    -(2**64),
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "x" * 5000,
    "a\x00b",
    "\ud800",
    "\u2028\r\n\x1b[31m",
    "NaN",
    "../../etc/passwd",
    "00000000-0000-0000-0000-000000000000",
    [],
    [[]],
    [None],
    [1] * 500,
    {},
    {"": None},
    {"a": {"b": [1]}},
    {str(number): number for number in range(300)},
]


def mutated(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy of the document with one to three changes anywhere in it."""
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(document, chance)
    return document


def _change(document: dict[str, Any], chance: random.Random) -> None:
    container: Any = document
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if not keys:
            break
        key = chance.choice(keys)
        if isinstance(container[key], dict | list) and container[key] and chance.random() < 0.7:
            container = container[key]
            continue
        break
    action = chance.random()
    if not keys or action < 0.1:
        _add(container, chance)
    elif action < 0.2:
        del container[key]
    elif action < 0.25:
        container[key] = _nested(chance.choice((5, 40, 70, 200)), container[key])
    elif action < 0.35:
        container[key] = [container[key]] * chance.choice((1, 2, 50))
    elif action < 0.45 and isinstance(container[key], str):
        container[key] = _scrambled(container[key], chance)
    else:
        container[key] = copy.deepcopy(chance.choice(ODD))


def _add(container: Any, chance: random.Random) -> None:
    value = copy.deepcopy(chance.choice(ODD))
    if isinstance(container, dict):
        container[chance.choice(("new", "", "type", "data", "\x00", "x" * 300))] = value
    else:
        container.append(value)


def _nested(depth: int, value: Any) -> Any:
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def _scrambled(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(("", "\x00", "é", "\ud83d", '"', "-", "9" * 30)) + text[at:]


def damaged(text: bytes, chance: random.Random) -> bytes:
    """The bytes with one change: cut, overwritten, doubled or replaced."""
    if not text:
        return b"\xff"
    at = chance.randrange(len(text))
    return chance.choice(
        (
            text[:at],
            text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :],
            text[:at] + text,
            text[at:],
            text[:at] + b"\xff\xfe" + text[at:],
            bytes(chance.randrange(256) for _ in range(chance.randrange(60))),
            b"",
        )
    )


def as_json(value: Any) -> str:
    """JSON as careless programs write it: with NaN, infinities and lone surrogates."""
    return json.dumps(value, separators=(",", ":"))
