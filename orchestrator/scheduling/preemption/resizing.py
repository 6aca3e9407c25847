"""When a running elastic run gets another size. Pure; the scheduler and simulations use it."""

from __future__ import annotations

from typing import Final

# from the placement to the first step; a change of size also saves a checkpoint before
STARTUP_S: Final = 20.0
RESTART_S: Final = 2 * STARTUP_S
# a run that has just started is left alone
YOUNG_S: Final = 60.0


def saves_time(left_s: float | None, *, slowdown: float, larger: float) -> bool:
    """Whether a run saves more time on a larger size than its restart takes.

    `left_s` is the time to its end at its size, None if unknown; `slowdown` and `larger` are the
    step times at its size and at the larger one over that of the largest.
    """
    return left_s is None or left_s * (1.0 - larger / slowdown) > RESTART_S
