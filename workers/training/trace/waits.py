"""Times the training thread's waits for communication by wrapping torch's wait methods.

Active between `install` and `remove`; torch has no hooks for waits, so its methods are replaced.
Does not depend on the kind of collective.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Timed = Callable[[Callable[[], Any]], Any]


class WaitTimer:
    """Calls `timed(wait)` for each wait of the training thread, which must call `wait`.

    On a CPU the thread that creates this object counts; on CUDA any thread that waits on its
    stream, since backward passes run in other threads there. Costs 0.3 µs per wait.
    """

    def __init__(self, timed: Timed, device: torch.device) -> None:
        self._timed, self._cuda = timed, device.type == "cuda"
        self._thread = threading.get_ident()
        self._stream = torch.cuda.current_stream() if self._cuda else None
        self._restore: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Wrap torch's wait methods."""
        self._replace(dist.Work, "wait")
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None:  # imported by DTensor, which waits for collectives in C++
            self._replace(functional, "wait_tensor")
        if self._cuda:  # `fully_shard` uses these for its side streams
            for name in ("wait_event", "wait_stream"):
                self._replace(torch.cuda.Stream, name, on_stream=True)

    def remove(self) -> None:
        """Restore torch's methods."""
        while self._restore:
            setattr(*self._restore.pop())

    def _replace(self, owner: Any, name: str, *, on_stream: bool = False) -> None:
        wait = getattr(owner, name)

        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not (args[0] == self._stream if on_stream else self._on_training_thread()):
                return wait(*args, **kwargs)
            return self._timed(lambda: wait(*args, **kwargs))

        self._restore.append((owner, name, wait))
        setattr(owner, name, timed)

    def _on_training_thread(self) -> bool:
        if self._cuda:
            return bool(torch.cuda.current_stream() == self._stream)
        return threading.get_ident() == self._thread
