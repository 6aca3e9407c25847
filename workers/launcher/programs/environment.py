"""Where the packages of a script run are on this node, and the words that prepare them.

The program `prepare_environment` builds them, under the run's user. Starts nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.contracts.specs.script import UV_LOCK, ScriptEnvironment
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.exits.classification import Verdict
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.rundir import RunDir, read_json

PREPARE: Final = Path(__file__).resolve().parent / "prepare_environment.py"
FOLDER: Final = "environments"  # in the node's home, or in the home of the run's user
REPORT: Final = "environment.json"  # in the attempt's directory
KEEP_VARIABLE: Final = "ORRERY_ENVIRONMENT_DAYS"
KEEP_DAYS: Final = 30.0
LOCKED_PROJECT: Final = "pyproject.toml"  # what uv.lock belongs to


class MissingLock(ValueError):
    """The lock file cannot be read on this node; the message says which."""


@dataclass(frozen=True)
class PreparedEnvironment:
    """The Python that starts torchrun, and the request to `prepare_environment`."""

    python: str
    request: dict[str, Any]

    def wrapped(self, arguments: list[str]) -> list[str]:
        """The command that prepares the packages, then becomes the program."""
        words = [sys.executable, "-S", "-E", str(PREPARE), json.dumps(self.request), "--"]
        return [*words, *arguments]


def environment_of(order: LaunchOrder) -> ScriptEnvironment | None:
    """What a script's order asks for; None for other kinds and for the node's own packages."""
    wanted = (order.spec.get("script") or {}).get("environment")
    if order.kind != "script" or not wanted:
        return None
    environment = ScriptEnvironment.from_dict(wanted)
    return environment if environment.lock or environment.modules else None


def plan_environment(
    environment: ScriptEnvironment,
    run_dir: RunDir,
    *,
    work_folder: Path,
    home: Path,
    user: RunUser | None,
) -> PreparedEnvironment:
    """The environment on this node; reads the lock file. Raises MissingLock.

    Runs with the same lock share one. With a user per run it is in that user's home, so that no
    user can change the packages of another one.
    """
    base = environment.python or sys.executable
    request: dict[str, Any] = {
        "modules": environment.modules,
        "report": str(run_dir.path / REPORT),
        "base": base,
    }
    if environment.lock is None:
        return PreparedEnvironment(base, request)
    lock = work_folder / environment.lock
    fingerprint = _fingerprint(environment, lock, base)
    top = (home if user is None else home / "users" / str(user.uid)) / FOLDER
    folder = top / fingerprint[:32]
    node_packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    request |= {
        "lock": str(lock),
        "fingerprint": fingerprint,
        "folder": str(folder),
        "node_packages": node_packages if environment.node_packages else [],
        "keep_days": _keep_days(),
    }
    return PreparedEnvironment(str(folder / "bin" / "python"), request)


def _fingerprint(environment: ScriptEnvironment, lock: Path, base: str) -> str:
    """SHA-256 over all that decides which packages are installed."""
    digest = hashlib.sha256()
    files = [lock, *([lock.with_name(LOCKED_PROJECT)] if lock.name == UV_LOCK else [])]
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise MissingLock(f"{file} cannot be read on this node: {error.strerror}") from None
        digest.update(f"{file.name} {len(content)}\0".encode() + content)
    parts = [platform.machine(), sys.platform, base, platform.python_version()]
    parts += [str(environment.node_packages), *environment.modules]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()


def _keep_days() -> float:
    """After how many days without use an environment is deleted; 0: never."""
    try:
        return float(os.environ.get(KEEP_VARIABLE) or KEEP_DAYS)
    except ValueError:
        return KEEP_DAYS


def read_report(run_dir: RunDir) -> dict[str, Any]:
    """What `prepare_environment` reported; empty until it has ended."""
    return read_json(run_dir.path / REPORT)


def failure(run_dir: RunDir, order: LaunchOrder) -> Verdict | None:
    """The verdict on an attempt whose packages could not be prepared; None if they were."""
    if environment_of(order) is None:
        return None
    report = read_report(run_dir)
    if report.get("state") != "failed":
        return None
    user_error = report.get("class") == "user_error"
    exit_class = "user_error" if user_error else "infrastructure"
    return Verdict(exit_class, str(report.get("reason") or ""), time=time.time())


def event_of(report: dict[str, Any]) -> dict[str, Any]:
    """The data of the event `environment_prepared`, from a file that the run may have written."""
    packages = report.get("packages")
    listed = [str(each)[:200] for each in packages] if isinstance(packages, list) else []
    number = report.get("seconds")
    return {
        "fingerprint": str(report.get("fingerprint") or "")[:64] or None,
        "seconds": float(number) if isinstance(number, int | float) else 0.0,
        "built": bool(report.get("built")),
        "python": str(report.get("python") or "")[:40],
        "modules": [str(each)[:200] for each in report.get("modules") or []][:50],
        "packages": listed[:1000],
    }
