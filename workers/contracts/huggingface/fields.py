"""Typed access to the fields of one configuration, with an error message for each invalid value.

Does not depend on any model family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.contracts.base import with_hint

_REQUIRED: Any = object()
_SAME: Any = object()


class UnreadableConfig(ValueError):
    """A configuration that cannot be read as a ModelSpec: which field, why, and what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(with_hint(message, hint))
        self.message, self.hint = message, hint


class ConfigFields:
    """The keys of one configuration.

    `label` names the configuration in errors, e.g. `config.json (llama)`. With `for_weights` the
    shape is used to load weights, so everything that would change a logit is checked as well.
    """

    def __init__(self, values: Mapping[str, Any], label: str, *, for_weights: bool = False) -> None:
        self.values, self.label, self.for_weights = values, label, for_weights

    def error(self, key: str, message: str, hint: str) -> UnreadableConfig:
        """The exception for field `key`."""
        return UnreadableConfig(f"{self.label}: {key} {message}", hint)

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = _REQUIRED) -> int:
        """An integer of at least 1 under the first present key. Raises UnreadableConfig."""
        key, value = self._first(keys)
        if value is None:
            if default is _REQUIRED or default is None:
                raise self.error(
                    key, "is missing", f"Add {' or '.join(keys)}, an integer of at least 1."
                )
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"is {_shown(value)}", "Use an integer of at least 1.")
        return value

    def number(self, *keys: str, default: float | None = _REQUIRED) -> float:
        """A finite number under the first present key. Raises UnreadableConfig."""
        key, value = self._first(keys)
        if value is None:
            if default is _REQUIRED or default is None:
                raise self.error(key, "is missing", f"Add {' or '.join(keys)}, a number.")
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or abs(value) > 1e300
            or value != value
        ):
            raise self.error(key, f"is {_shown(value)}", "Use a number.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean. Raises UnreadableConfig."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}", "Use true or false.")
        return value

    def text(self, *keys: str, default: str) -> str:
        """A string under the first present key. Raises UnreadableConfig."""
        key, value = self._first(keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"is {_shown(value)}", "Use text.")
        return value

    def require(self, key: str, required: Any, *, default: Any = _SAME, why: str) -> None:
        """Refuse the configuration unless `key` is `required`; `why` explains the refusal.

        `default` is what the family's own class uses if the key is absent: `required` unless
        passed. A null counts as false.
        """
        value = self.values.get(key, required if default is _SAME else default)
        if value is None and required is False:
            return
        if value != required or isinstance(value, bool) != isinstance(required, bool):
            raise self.error(
                key,
                f"is {_shown(value)}: {why}",
                f"Use a configuration with {key} {_shown(required)}.",
            )

    def _first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        key = next((key for key in keys if self.has(key)), keys[0])
        return key, self.values.get(key)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
