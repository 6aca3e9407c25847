"""Decides at the agent's start under which user runs execute, and checks that it works here.

An agent that is root isolates by default. Does not start runs.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from workers.contracts.wire.node_messages import LIMITS_OF_IMAGES, Isolation
from workers.launcher import command
from workers.launcher.isolation import containers, limits, start, wrap
from workers.launcher.isolation.run_user import NoRunUser, RunAs, RunUser, run_gid

# a program that cannot read this Python may run another one: the loader then finds its library
_PROBE = (
    "import asyncio, os, sys; os.stat(sys.argv[1]); print(asyncio.__file__, flush=True); "
    "import redis, workers.launcher.command"
)


@dataclass(frozen=True)
class RunIsolation:
    """`run_as` None: runs execute as the agent's user. `report` is what pages show."""

    run_as: RunAs | None
    report: Isolation


def choose(home: Path, setting: str) -> RunIsolation:
    """How this node separates runs, from ORRERY_RUN_AS and what is installed; prepares the home.

    Sets variables that supervisors read. Raises NoRunUser, or ValueError for a wrong runtime.
    """
    chosen = _choose_user(home, setting)
    runtime = containers.detect(os.environ.get(containers.SETTING, ""))
    os.environ[containers.CHOSEN] = "" if runtime is None else runtime[0].name
    limited = limits.supported()
    os.environ[start.LIMITS_VARIABLE] = "systemd" if limited else ""
    method = limits.METHOD if limited else None
    if runtime is not None and runtime[0].name == "docker" and not limited:
        method = LIMITS_OF_IMAGES
    report = chosen.report.model_copy(
        update={
            "container": None if runtime is None else f"{runtime[0].name} {runtime[1]}"[:80],
            "limits": method,
        }
    )
    return RunIsolation(chosen.run_as, report)


def _choose_user(home: Path, setting: str) -> RunIsolation:
    """Read ORRERY_RUN_AS (empty: choose) and prepare the home. Raises NoRunUser."""
    required = bool(setting.strip())
    run_as = RunAs.parse(setting if required else "uids")
    if run_as.method == "agent":
        return _same_user("ORRERY_RUN_AS is agent")
    if os.geteuid() != 0:
        if required:
            raise NoRunUser(f"ORRERY_RUN_AS={setting} needs an agent that runs as root.")
        return _same_user("the agent is not root")
    before = stat.S_IMODE(home.stat().st_mode)
    home.chmod(before | 0o011)  # runs may enter it; what it contains has its own modes
    if problem := _problem(home, run_as):
        home.chmod(before)
        if required:
            raise NoRunUser(f"ORRERY_RUN_AS={setting} does not work on this node: {problem}")
        return _same_user(problem)
    os.setgroups([])  # in the name of a run's user, root's groups give no access
    detail = (
        f"account {run_as.account}"
        if run_as.method == "account"
        else f"a user of its own per owner, numbers from {run_as.first}"
    )
    return RunIsolation(run_as, Isolation(method=run_as.method, detail=detail))


def _same_user(why: str) -> RunIsolation:
    return RunIsolation(None, Isolation(method="agent", detail=why[:300]))


def _problem(home: Path, run_as: RunAs) -> str:
    """Why a program under a run's user cannot work on this node; empty if it can."""
    if run_as.method == "account" and "{user}" in run_as.account:
        return ""  # the accounts are only known with their runs
    gid = run_gid("0")
    user = RunUser(run_as.first, run_as.first, "probe", (gid,), gid)
    if run_as.method == "account":
        user = run_as.user(None, "0", ())
    probe = wrap.as_user([sys.executable, "-c", _PROBE, str(home)], user)
    environ = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(command.ROOT)}
    try:
        done = subprocess.run(
            probe, cwd="/", env=environ, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    library = done.stdout.strip()
    if library and library != asyncio.__file__:
        folder = Path(asyncio.__file__).parent.parent
        return f"another user cannot read the library of {sys.executable} in {folder}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"another user cannot start {sys.executable}: {lines[-1]}"
    return ""
