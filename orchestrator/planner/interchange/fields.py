"""A configuration's fields, read one by one with their type checked, and the sentence when one will
not do.

Knows JSON values; does not know any model family or engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REQUIRED: Any = object()


class Unreadable(ValueError):
    """A configuration that cannot be read as a ModelSpec: which field, why, and what to do next."""


class Fields:
    """The keys of one configuration.

    Errors name the key and the configuration (`what`, e.g. `llama config.json`).
    """

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self.values, self.what = values, what

    def refuse(self, key: str, message: str, next_: str) -> Unreadable:
        return Unreadable(f"{self.what}: {key} {message}; {next_}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def whole(self, *keys: str, default: int | None = _REQUIRED) -> int:
        """A whole number of at least 1 under the first of `keys` that is there.

        Raises Unreadable.
        """
        key = next((key for key in keys if self.has(key)), keys[0])
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED or default is None:
                raise self.refuse(
                    key, "is missing", f"add {' or '.join(keys)}, a whole number of at least 1"
                )
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, f"is {_shown(value)}", "a whole number of at least 1 is wanted")
        return value

    def number(self, *keys: str, default: float | None = _REQUIRED) -> float:
        """A finite number under the first of `keys` that is there. Raises Unreadable."""
        key = next((key for key in keys if self.has(key)), keys[0])
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED or default is None:
                raise self.refuse(key, "is missing", f"add {' or '.join(keys)}, a number")
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or abs(value) > 1e300
            or value != value
        ):
            raise self.refuse(key, f"is {_shown(value)}", "a number is wanted")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises Unreadable."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {_shown(value)}", "true or false is wanted")
        return value

    def word(self, *keys: str, default: str) -> str:
        """Text under the first of `keys` that is there. Raises Unreadable."""
        key = next((key for key in keys if self.has(key)), keys[0])
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, f"is {_shown(value)}", "text is wanted")
        return value

    def want(self, key: str, wanted: Any, *, default: Any, why: str) -> None:
        """Refuse the configuration unless `key` (or its default where missing) is `wanted`; `why`
        follows the value.

        `default` is what the family's own implementation takes where the key is absent.
        """
        value = self.values.get(key, default)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            raise self.refuse(
                key, f"is {_shown(value)}: {why}", f"only {key} {_shown(wanted)} can be read"
            )


def _shown(value: object) -> str:
    text = (
        {None: "null", True: "true", False: "false"}.get(value)
        if isinstance(value, bool | None)
        else None
    )
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
