"""Processes of an attempt: liveness, membership, and killing all of them.

Ranks may have their own sessions and parents. They are found as descendants and by ORRERY_FENCE and
ORRERY_NODE in their environment, since two agents on one machine may share an attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def start_time(pid: int) -> float | None:
    """When a living process started (Unix seconds), else None."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def is_alive(pid: int, started: float) -> bool:
    """Whether the process with this start time still lives; a reused pid does not count."""
    actual = start_time(pid)
    return actual is not None and abs(actual - started) < 1.0


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process instead of init's (Linux)."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """For `preexec_fn`: SIGKILL when the parent thread ends, so that a killed supervisor leaves no
    processes (Linux).
    """
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def members(
    fence: str, *, node: str | None = None, root: int | None = None
) -> list[psutil.Process]:
    """Living processes of an attempt, without this one: descendants of `root`, and all with the
    fence and the node's name in their environment (any node by default).
    """
    processes: dict[int, psutil.Process] = {}
    if root is not None:
        with contextlib.suppress(psutil.Error):
            processes = {
                process.pid: process for process in psutil.Process(root).children(recursive=True)
            }
    for pid in _pids_with(f"ORRERY_FENCE={fence}", *([f"ORRERY_NODE={node}"] if node else [])):
        with contextlib.suppress(psutil.Error):
            processes.setdefault(pid, psutil.Process(pid))
    processes.pop(os.getpid(), None)
    return [process for process in processes.values() if _is_running(process)]


def kill_all(
    fence: str, *, node: str | None = None, root: int | None = None, patience_s: float = 5.0
) -> list[int]:
    """SIGKILL every member until none is left; returns pids still alive after `patience_s` (stuck
    in
    the kernel).
    """
    deadline = time.monotonic() + patience_s
    while left := members(fence, node=node, root=root):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() > deadline:
            return [process.pid for process in left]
        time.sleep(0.02)
    return []


def reap(spare: int | None = None) -> None:
    """Collect adopted orphans that exited, except `spare`, which other code waits for."""
    with contextlib.suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid != spare:
            os.waitpid(ended.si_pid, os.WNOHANG)


def oom_kill_count() -> int:
    """Number of processes of this control group, or machine, that the kernel's out-of-memory killer
    has killed so far.
    """
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        for folder in (Path("/sys/fs/cgroup") / group.lstrip("/"), Path("/sys/fs/cgroup")):
            if (events := folder / "memory.events").exists():
                return _counter(events, "oom_kill")
    with contextlib.suppress(OSError, ValueError):
        return _counter(Path("/proc/vmstat"), "oom_kill")
    return 0


def oom_kills_in_group_of(pid: int) -> int:
    """The same counter of the control group of this process alone; 0 if it has ended."""
    with contextlib.suppress(OSError, ValueError):
        group = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("::")[2]
        return _counter(Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events", "oom_kill")
    return 0


def _counter(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _pids_with(*entries: str) -> list[int]:
    if not sys.platform.startswith("linux"):
        return []
    required, pids = {entry.encode() for entry in entries}, []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if required <= set(file.read().split(b"\0")):
                    pids.append(int(name))
    return pids


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
