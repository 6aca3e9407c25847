"""Work in a thread that ends with it, so that its OpenMP workers end too.

libgomp keeps the workers of every thread that ever computed. Once there are more of them than
cores, all teams sleep
at each barrier and not only the idle ones: a server that loaded its model in the main thread and
computed in another
took 73 ms a token where 43 do (SmolLM2 on 2 cores, 1 request a second).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1, thread_name_prefix="apart") as thread:
        return thread.submit(work).result()
