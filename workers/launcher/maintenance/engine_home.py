"""Maintains the shared home of an engine, from within a job: engines have no agents.

Ships what killed supervisors of ended attempts left, under their own identities, and deletes what
garbage collection ordered. Runs next to a supervisor; a repetition, also by another job, is
harmless.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from workers.contracts.wire.maintenance.storage import StorageReport
from workers.contracts.wire.node_messages import LaunchOrder, LeftSupervisor
from workers.launcher.maintenance import garbage
from workers.launcher.recovery import recover
from workers.launcher.rundir import RunDir

FOLDER: Final = "engine"  # in the home, with a file per supervisor until it has reported everything
_PATIENCE_S: Final = 120.0
_FORGOTTEN_S: Final = 2 * 86400.0  # an attempt that wrote nothing for so long is not active


def node_file(home: Path, name: str) -> Path:
    """Where a supervisor's identity is; it removes the file when it has reported everything."""
    return home / FOLDER / f"{name}.json"


def maintain(home: Path, order: LaunchOrder, send: Callable[[StorageReport], bool]) -> None:
    """Do what the order wants in the home; `send` returns whether the broker has a report."""
    for left in order.left:
        try:
            _ship(home, left)
        except (OSError, ValueError) as error:
            print(f"What {left.node} left could not be sent: {error}", flush=True)
    if order.collect is None:
        return
    try:
        for report in garbage.collect(home, order.collect, since=time.time() - _FORGOTTEN_S):
            if not send(report):
                return  # the order is repeated
    except OSError as error:
        print(f"Garbage collection failed: {error}", flush=True)


def _ship(home: Path, left: LeftSupervisor) -> None:
    """Report and send what the supervisor did not; nothing if it did."""
    file, run_dir = node_file(home, left.node), RunDir(home / left.run_dir)
    if not file.exists() or not run_dir.order.exists():
        return
    report = recover(run_dir, file, patience_s=_PATIENCE_S, store_patience_s=_PATIENCE_S)
    if report is not None:
        file.unlink(missing_ok=True)
        print(f"What the supervisor {left.node} left in {run_dir} was sent.", flush=True)
