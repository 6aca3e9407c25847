"""Exit classes: why an attempt ended, for ranks, supervisors and the control plane alike.

Does not decide which class an exit has: see `workers/runtime/exit_codes.py` and
`workers/launcher/exits/classification.py`.
"""

from __future__ import annotations

from enum import StrEnum


class ExitClass(StrEnum):
    """Why an attempt ended."""

    OK = "ok"
    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    NUMERICS = "numerics"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    LOST = "lost"
