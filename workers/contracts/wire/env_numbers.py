"""Numbers out of a process's environment variables. Knows none of them by name."""

from __future__ import annotations

from collections.abc import Mapping

from workers.contracts.wire.exits import UserError


def whole(env: Mapping[str, str], name: str, default: int) -> int:
    """Raises UserError naming the variable that is not a whole number."""
    try:
        return int(env.get(name, default))
    except ValueError:
        raise UserError(
            f"{name}={env[name]!r} is not a whole number; try {name}={default}"
        ) from None
