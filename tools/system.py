"""Installs the system packages that the tests use: Chromium, PostgreSQL, nginx, gettext,
iproute2, redis-server, munge, Slurm, docker-compose, systemd-analyze and environment modules.

Requires root on Debian or Ubuntu. Elsewhere it prints one sentence that lists what the tests leave
out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NEEDS = {
    "chromium": (
        "the browser tests",
        lambda: _available("chromium", "chromium-browser", "google-chrome"),
    ),
    "postgresql": (
        "the tests on PostgreSQL",
        lambda: any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or _available("initdb"),
    ),
    "nginx-light": (
        "the check of deploy/nginx",
        lambda: _available("nginx") or Path("/usr/sbin/nginx").exists(),
    ),
    "gettext": ("the check of the message catalogue", lambda: _available("xgettext")),
    "iproute2": ("partitions in the fault injection", lambda: _available("ip")),
    "redis-server": (
        "connections to Redis with TLS and its own users",
        lambda: _available("redis-server"),
    ),
    "munge": ("runs on Slurm", lambda: _available("munged") or Path("/usr/sbin/munged").exists()),
    "slurm-wlm": (
        "runs on Slurm",
        lambda: Path("/usr/sbin/slurmctld").exists() and Path("/usr/sbin/slurmd").exists(),
    ),
    "slurmrestd": ("jobs by slurmrestd", lambda: Path("/usr/sbin/slurmrestd").exists()),
    "slurm-wlm-jwt-plugin": (
        "logins at slurmrestd by token",
        lambda: any(Path("/usr/lib").glob("*/slurm-wlm/auth_jwt.so")),
    ),
    "docker-compose": ("the check of deploy/compose.yaml", lambda: _available("docker-compose")),
    "slurmdbd": ("accounting of Slurm", lambda: Path("/usr/sbin/slurmdbd").exists()),
    "mariadb-server-core": ("accounting of Slurm", lambda: Path("/usr/sbin/mariadbd").exists()),
    "systemd": ("the check of deploy/systemd", lambda: _available("systemd-analyze")),
    "environment-modules": (
        "scripts that load modules",
        lambda: Path("/usr/share/modules/init/bash").exists(),
    ),
}


def main() -> int:
    missing = [package for package, (_, present) in NEEDS.items() if not present()]
    if not missing:
        return 0
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"system: installing {', '.join(missing)}", flush=True)
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(
                ["apt-get", "-qq", *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            if done.returncode != 0:
                break
        missing = [package for package, (_, present) in NEEDS.items() if not present()]
    if missing:
        left_out = "; ".join(f"{NEEDS[package][0]} (no {package})" for package in missing)
        print(
            f"system: the tests leave out: {left_out}. Install the named packages to run "
            "everything.",
            flush=True,
        )
        if os.environ.get("CI"):
            return 1
    return 0


def _available(*names: str) -> bool:
    return any(shutil.which(name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
