"""Distinguishes an outage of the database or broker from an error that a message causes.

During an outage messages wait; an error of the message itself counts as its failure.
"""

from __future__ import annotations

from typing import Final

import redis
from django.db import InterfaceError, InternalError, OperationalError

# the message is larger than the database accepts: it fails again, however often it is tried
_LIMITS: Final = ("too many sql variables", "too big", "too large", "too many terms")
_SQLSTATE_LIMIT: Final = "54"  # PostgreSQL: program_limit_exceeded


def is_outage(error: BaseException) -> bool:
    """Whether the same message may succeed later without any change."""
    if isinstance(error, (redis.RedisError, OSError, InterfaceError, InternalError)):
        return True
    if not isinstance(error, OperationalError):
        return False
    state = str(getattr(error.__cause__, "sqlstate", None) or "")
    text = str(error).lower()
    return not (state.startswith(_SQLSTATE_LIMIT) or any(limit in text for limit in _LIMITS))
