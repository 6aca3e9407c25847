"""Deletes checkpoints and attempt folders of ended runs on request, and measures run folders.

Deletes nothing outside `runs/` and nothing of an attempt that runs here or has not been reported.
Deleting again frees nothing and is not an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from workers.contracts.wire.maintenance.storage import (
    MOST_ITEMS,
    Collected,
    CollectOrder,
    StorageReport,
)
from workers.contracts.wire.maintenance.storage import StoredRun as Stored
from workers.launcher.isolation.acting import as_owner
from workers.launcher.recovery import is_reported
from workers.launcher.rundir import RunDir, run_dirs

CHECKPOINTS = "checkpoints"


def collect(home: Path, order: CollectOrder, *, since: float = 0.0) -> Iterator[StorageReport]:
    """Delete what the order names, then scan if requested; one or more reports.

    Attempts without a reported exit are active; those older than `since` (Unix seconds) are not.
    """
    items = [(path, _delete_checkpoint) for path in order.checkpoints]
    items += [(path, _delete_attempt) for path in order.attempts]
    if items:
        active = {
            run_dir.path
            for run_dir in run_dirs(home)
            if not is_reported(run_dir) and run_dir.path.stat().st_mtime >= since
        }
        yield StorageReport(collected=[_one(home, path, work, active) for path, work in items])
    if order.scan:
        stored = sorted(scan(home), key=lambda item: item.name)
        for start in range(0, max(1, len(stored)), MOST_ITEMS):
            yield StorageReport(runs=stored[start : start + MOST_ITEMS], first=start == 0)


def scan(home: Path) -> Iterator[Stored]:
    """Every folder below `runs/`; hard links to other runs' files count in each."""
    root = home / "runs"
    if not root.is_dir():
        return
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False):
            size, newest = _measure(Path(entry.path))
            attempts = {folder.name: _removable(folder) for folder in _attempts(Path(entry.path))}
            yield Stored(name=entry.name[:255], bytes=size, modified=newest, attempts=attempts)


def _attempts(run: Path) -> list[Path]:
    """The folders of the run's attempts."""
    return [
        folder
        for folder in sorted(run.glob("attempt-*"))[:MOST_ITEMS]
        if folder.is_dir() and not folder.is_symlink()
    ]


def _removable(attempt: Path) -> int:
    """Bytes of an attempt's folder without its checkpoints."""
    checkpoints = attempt / CHECKPOINTS
    size = _measure(attempt)[0]
    return size - _measure(checkpoints)[0] if checkpoints.is_dir() else size


def _one(home: Path, text: str, work: Callable[[Path], int], active: set[Path]) -> Collected:
    parts = PurePosixPath(text).parts
    path = home / text
    if PurePosixPath(text).is_absolute() or ".." in parts or parts[:1] != ("runs",):
        return Collected(path=text, problem="It is not below runs/.")
    if len(parts) < 3 or path.resolve() != home.resolve() / text:
        return Collected(path=text, problem="It is not in a run's folder, or behind a link.")
    run = home / parts[0] / parts[1]
    if any(each.is_relative_to(run) for each in active):
        return Collected(path=text, problem="An attempt of this run is active on the node.")
    if not path.is_dir():
        return Collected(path=text)
    try:
        with as_owner(run):
            return Collected(path=text, bytes=work(path))
    except OSError as error:
        return Collected(path=text, problem=f"{error.strerror or error}: {error.filename}"[:300])


def _delete_checkpoint(path: Path) -> int:
    size, _ = _measure(path)
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)  # a reader never sees a part of it
    shutil.rmtree(doomed)
    return size


def _delete_attempt(path: Path) -> int:
    """Delete everything but checkpoints, and the folder itself if nothing is left."""
    if not RunDir(path).order.exists() and not any(path.glob("node-*/order.json")):
        raise OSError(0, "This is not an attempt's folder", str(path))
    freed = 0
    for entry in sorted(path.iterdir()):
        if entry.name == CHECKPOINTS and entry.is_dir() and any(entry.iterdir()):
            continue
        if entry.is_dir() and not entry.is_symlink():
            freed += _measure(entry)[0]
            shutil.rmtree(entry)
        else:
            freed += entry.lstat().st_size
            entry.unlink()
    if not any(path.iterdir()):
        path.rmdir()
    return freed


def _measure(folder: Path) -> tuple[int, float]:
    """Bytes of all files, and the newest change in Unix seconds; files may vanish meanwhile."""
    size, newest = 0, folder.stat().st_mtime
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                facts = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            size, newest = size + facts.st_size, max(newest, facts.st_mtime)
    return size, newest
