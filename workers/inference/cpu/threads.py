"""Runs a function in a thread of its own, so that its OpenMP workers end with it.

libgomp keeps the workers of every thread that ever computed. With more workers than cores, all
teams sleep at each barrier: a server that loaded its model in the main thread and computed in
another took 73 ms per token instead of 43 (SmolLM2 on 2 cores, 1 request per second).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_own_thread(work: Callable[[], T]) -> T:
    """The result of `work`, or its exception."""
    with ThreadPoolExecutor(1, thread_name_prefix="own-thread") as thread:
        return thread.submit(work).result()
