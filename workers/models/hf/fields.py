"""The fields of a `config.json`, read one by one, type checked, with the sentence for one that will
not do.

Does not know families.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError

_MOST_BYTES = 4 << 20  # the longest published config.json is below 100 kB


class Fields:
    """A configuration's values; null counts as absent. `what` names it in errors."""

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.given, self.what = frozenset(values), what

    def refuse(self, key: str, message: str, next_: str) -> WeightsError:
        return WeightsError(f"{self.what}: {key} {message}; {next_}")

    def whole(self, *keys: str, default: int | None = None) -> int:
        """A whole number of at least 1 under the first of `keys` that is there, else `default`."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, f"is {value!r}", "a whole number of at least 1 is wanted")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self.refuse(key, f"is {value!r}", "a number is wanted")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}", "true or false is wanted")
        return value

    def word(self, *keys: str, default: str) -> str:
        key, value = self._first(keys, default)
        if not isinstance(value, str):
            raise self.refuse(key, f"is {value!r}", "text is wanted")
        return value

    def want(self, key: str, wanted: object, *, default: object) -> None:
        """Refuse anything else under `key`: the decoder would compute other numbers."""
        value = self.values.get(key, default)
        if value != wanted:
            raise self.refuse(key, f"is {value!r}", f"only {wanted!r} can be read")

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for key in keys:
            if key in self.values:
                return key, self.values[key]
        if default is None:
            raise self.refuse(keys[0], "is missing", "add it")
        return keys[0], default


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises WeightsError for what is no JSON object of a sensible size."""
    try:
        if path.stat().st_size > _MOST_BYTES and not path.name.endswith(".index.json"):
            raise WeightsError(
                f"{path} has {path.stat().st_size:,} bytes, too many for a configuration"
            )
        found = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path} does not exist; give a folder as transformers saves it"
        ) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path} is not JSON: {str(error)[:80]}; save it again") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{path} holds no JSON object; give a folder as transformers saves it")
    return found
