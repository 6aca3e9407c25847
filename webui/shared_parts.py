"""Parts of pages that are equal for many users, computed once per process for many requests.

A part is cached for a multiple of the time that it took, which bounds its share of a web process
and grows with the load of machine and database; a cheap one is computed for each request. Does not
depend on what a part contains.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

FREE_S = 0.01  # a part that takes less is not cached
TIMES = 20  # a part takes at most about this fraction of a process's time: 5%
LONGEST_S = 10.0
KEYS = 64


class _Newest(Generic[T]):
    """The newest result of a function. While one request computes it again, others get the old."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: tuple[float, T] | None = None  # until when it is new, result

    def get(self, compute: Callable[[], T]) -> T:
        """The stored result while it is new, else what the function returns or raises."""
        stored = self._stored
        if stored is not None and time.monotonic() < stored[0]:
            return stored[1]
        if stored is not None and self._lock.locked():
            return stored[1]
        with self._lock:
            stored = self._stored
            if stored is not None and time.monotonic() < stored[0]:
                return stored[1]
            started = time.monotonic()
            result = compute()
            ended = time.monotonic()
            life_s = min(LONGEST_S, TIMES * (ended - started))
            self._stored = (ended + life_s, result) if ended - started >= FREE_S else None
            return result


class SharedPart(Generic[T]):
    """What is equal for all users."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._newest = _Newest[T]()

    def get(self) -> T:
        """The result: at most some seconds old, new if it is cheap. Raises what the function does.

        Requests wait for each other only before the first result.
        """
        return self._newest.get(self._compute)


class SharedByKey(Generic[K, T]):
    """What is equal for all requests with the same key, for example for users with equal rights.

    Keeps the results of the keys that were used last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: OrderedDict[K, _Newest[T]] = OrderedDict()

    def get(self, key: K, compute: Callable[[], T]) -> T:
        """As `SharedPart.get`. The function must depend on nothing but the key."""
        with self._lock:
            newest = self._newest.setdefault(key, _Newest())
            self._newest.move_to_end(key)
            if len(self._newest) > KEYS:
                self._newest.popitem(last=False)
        return newest.get(compute)
