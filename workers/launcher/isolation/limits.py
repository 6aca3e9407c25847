"""Limits of an attempt on this node, and the command line of systemd that enforces them.

A scope of systemd is a control group for the program and all its descendants. Starts nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

METHOD: Final = "memory, CPU time and processes by systemd"
_SYSTEM_PATH: Final = "/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Limits:
    """Of all processes of an attempt on one node together; None: not limited."""

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None

    @classmethod
    def of(cls, resources: Mapping[str, Any]) -> Limits:
        """The limits in `resources` of a spec."""
        memory_gb = resources.get("memory_gb")
        return cls(
            memory_bytes=None if memory_gb is None else int(float(memory_gb) * 1e9),
            cpus=resources.get("cpus"),
            processes=resources.get("processes"),
        )

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.memory_bytes, self.cpus, self.processes))


def in_scope(command: list[str], limits: Limits, *, name: str) -> list[str]:
    """The command in a scope of this name; systemd-run replaces itself by it.

    The group of an agent that is not root belongs to its user's own systemd.
    """
    properties = ["OOMPolicy=continue"]  # the ranks' exit codes say what happened
    if limits.memory_bytes is not None:
        properties += [f"MemoryMax={limits.memory_bytes}", "MemorySwapMax=0"]
    if limits.cpus is not None:
        properties.append(f"CPUQuota={limits.cpus * 100:.0f}%")
    if limits.processes is not None:
        properties.append(f"TasksMax={limits.processes}")
    return [
        shutil.which("systemd-run", path=_SYSTEM_PATH) or "systemd-run",
        *([] if os.getuid() == 0 else ["--user"]),
        "--scope",
        "--quiet",
        "--collect",
        f"--unit={name}",
        "--slice=orrery-runs",
        *(f"--property={each}" for each in properties),
        "--",
        *command,
    ]


def supported() -> bool:
    """Whether this process can start a scope with all limits, by starting one."""
    all_limits = Limits(memory_bytes=2**30, cpus=1.0, processes=64)
    probe = in_scope(["true"], all_limits, name=f"orrery-probe-{os.getpid()}")
    try:
        done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
