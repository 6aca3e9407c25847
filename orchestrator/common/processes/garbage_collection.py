"""Excludes what a process has loaded from garbage collection. Does not depend on Django."""

from __future__ import annotations

import gc


def exclude_loaded_objects() -> None:
    """Call once, after all modules are loaded: their objects never become garbage.

    A full collection of 200,000 objects stops all threads for 0.15 s, and it recurs: it was a third
    of the scheduler's CPU time for heartbeats.
    """
    gc.collect()
    gc.freeze()
