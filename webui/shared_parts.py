"""Parts of pages that are equal for all users, computed once per process for many requests.

A part is cached for a multiple of the CPU time that it took, which bounds its share of a core; a
cheap one is computed for each request. Does not depend on what a part contains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

FREE_S = 0.02  # a part that takes less is not cached
TIMES = 20  # a part takes at most about this fraction of a core: 5%
LONGEST_S = 30.0


class SharedPart(Generic[T]):
    """The newest result of a function. While one request computes it again, others get the old."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._stored: tuple[float, T] | None = None  # until when it is new, result

    def get(self) -> T:
        """The result: at most some seconds old, new if it is cheap. Raises what the function does.

        Requests wait for each other only before the first result.
        """
        stored = self._stored
        if stored is not None and time.monotonic() < stored[0]:
            return stored[1]
        if stored is not None and self._lock.locked():
            return stored[1]
        with self._lock:
            stored = self._stored
            if stored is not None and time.monotonic() < stored[0]:
                return stored[1]
            cpu_s, started = time.thread_time(), time.monotonic()
            result = self._compute()
            cpu_s = time.thread_time() - cpu_s
            if cpu_s < FREE_S:
                self._stored = None
            else:
                taken_s = time.monotonic() - started
                life_s = min(LONGEST_S, TIMES * cpu_s + taken_s)
                self._stored = (time.monotonic() + life_s, result)
            return result
