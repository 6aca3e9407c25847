"""Makes hanging ranks write the stacks of their threads, before they are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from workers.launcher import processes
from workers.launcher.hangs.hang_detector import is_stopped
from workers.launcher.rundir import RunDir, read_json

DUMP_S = 10.0  # how long hanging ranks may take to write their stacks


def dump_stacks(run_dir: RunDir, ranks: Iterable[int], fence: str, *, node: str) -> None:
    """Send SIGABRT: PYTHONFAULTHANDLER makes every rank write its threads' stacks and exit.

    Waits up to DUMP_S for all but stopped ranks, which do neither.
    """
    pending = []
    living = processes.members(fence, node=node, root=os.getpid())
    members = {process.pid for process in living}
    for rank in ranks:
        folder = run_dir.rank(rank)
        if pid := read_json(folder / "process.json").get("pid"):
            if pid not in members:  # the file is the run's own
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGABRT)
                pending += [] if is_stopped(pid) else [folder / "status.json"]
    deadline = time.monotonic() + DUMP_S
    while time.monotonic() < deadline and not all(status.exists() for status in pending):
        time.sleep(0.05)
