"""Maintains the shared home of an engine, from within a job: engines have no agents.

Ships what killed supervisors of ended attempts left, under their own identities, and deletes what
garbage collection ordered. Runs next to a supervisor; a repetition, also by another job, is
harmless.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from workers.contracts.wire.cluster_engines.jobs import IDENTITIES
from workers.contracts.wire.maintenance.storage import CollectOrder, StorageReport
from workers.contracts.wire.node_messages import LaunchOrder, LeftSupervisor
from workers.launcher.maintenance import garbage
from workers.launcher.recovery import is_reported, recover
from workers.launcher.rundir import RunDir

_PATIENCE_S: Final = 120.0  # for one supervisor
_TOTAL_S: Final = 600.0  # for all of an order
_FORGOTTEN_S: Final = 2 * 86400.0  # an attempt that was not marked for this long is not active
MARK_EVERY_S: Final = 3600.0


def node_file(home: Path, name: str) -> Path:
    """Where a supervisor's identity is; it removes the file when it has reported everything."""
    return home / IDENTITIES / f"{name}.json"


def maintain(home: Path, order: LaunchOrder, send: Callable[[StorageReport], bool]) -> None:
    """Do what the order wants in the home; `send` returns whether the broker has a report.

    Deletions come first, because shipping may last longer than the attempt. What fails or is late
    is left to a later job.
    """
    if order.collect is not None:
        try:
            _collect(home, order.collect, send)
        except Exception as error:
            print(f"Garbage collection failed: {error!r}", flush=True)
    ship(home, order.left)


def ship(home: Path, supervisors: Iterable[LeftSupervisor], *, total_s: float = 0.0) -> None:
    """Send what these supervisors left, for at most `total_s` seconds (0: `_TOTAL_S`)."""
    deadline = time.monotonic() + (total_s or _TOTAL_S)
    for left in supervisors:
        patience_s = min(_PATIENCE_S, deadline - time.monotonic())
        if patience_s <= 0:
            print("What other supervisors left is sent later.", flush=True)
            return
        try:
            _ship(home, left, patience_s)
        except Exception as error:
            print(f"What {left.node} left could not be sent: {error!r}", flush=True)


def mark_active(run_dir: RunDir) -> None:
    """Make the folder of a living attempt new, for the jobs that delete garbage in the home."""
    with contextlib.suppress(OSError):
        os.utime(run_dir.path)


def _collect(home: Path, order: CollectOrder, send: Callable[[StorageReport], bool]) -> None:
    for report in garbage.collect(home, order, since=time.time() - _FORGOTTEN_S):
        if not send(report):
            return  # the order is repeated


def _ship(home: Path, left: LeftSupervisor, patience_s: float) -> None:
    """Report and send what the supervisor did not; nothing if it did."""
    file, run_dir = node_file(home, left.node), RunDir(home / left.run_dir)
    if not file.exists() or not run_dir.order.exists():
        return
    if is_reported(run_dir):  # it was killed before it removed the file, or is about to
        file.unlink(missing_ok=True)
        return
    report = recover(run_dir, file, patience_s=patience_s, store_patience_s=patience_s)
    if report is not None:
        file.unlink(missing_ok=True)
        print(f"What the supervisor {left.node} left in {run_dir} was sent.", flush=True)
