"""Writes TOML and YAML text from plain values, without a library.

Does not depend on any engine's options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_YAML = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# words that YAML 1.1 reads as booleans or null
_YAML_CONSTANTS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML 1.0 of tables with integers, floats, booleans, text and nested lists of them.

    Dots in a table's name nest it.
    """
    blocks = []
    for name, values in tables.items():
        head = ".".join(_toml_key(part) for part in name.split("."))
        blocks.append(
            "\n".join(
                [
                    f"[{head}]",
                    *(f"{_toml_key(key)} = {_toml(value)}" for key, value in values.items()),
                ]
            )
        )
    return "\n\n".join(blocks) + "\n"


def yaml(values: Mapping[str, Any], indent: int = 0) -> str:
    """Block-style YAML of nested mappings of integers, floats, booleans, text and None."""
    pad, lines = " " * indent, []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{_yaml_text(key)}:" + ("" if value else " {}"))
            if value:
                lines.append(yaml(value, indent + 2).rstrip("\n"))
        else:
            lines.append(f"{pad}{_yaml_text(key)}: {_yaml(value)}")
    return "\n".join(lines) + "\n"


def commented(comments: Iterable[str], body: str) -> str:
    """Comment lines, a blank line, the body."""
    return "\n".join(comments) + "\n\n" + body


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return _number(value) if isinstance(value, int | float) else _quoted(value)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _number(value) if isinstance(value, int | float) else _yaml_text(value)


def _yaml_text(text: str) -> str:
    return (
        text
        if _PLAIN_YAML.fullmatch(text) and text.lower() not in _YAML_CONSTANTS
        else _quoted(text)
    )


def _number(value: float) -> str:
    """A number for both formats: YAML 1.1 requires a dot before the exponent, TOML a digit."""
    text = repr(value)
    if isinstance(value, float) and "e" in text:
        digits, _, power = text.partition("e")
        text = f"{digits if '.' in digits else digits + '.0'}e{int(power):+d}"
    return text


def _quoted(text: str) -> str:
    # an ASCII JSON string is valid in TOML and YAML; only DEL needs an escape
    return json.dumps(printable(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def printable(text: str) -> str:
    """The text without lone surrogates and control characters, which neither format allows."""
    return "".join(c if c.isprintable() or c == " " else " " for c in text)
