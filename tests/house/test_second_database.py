"""The database tests once more on PostgreSQL: the same code must hold on both."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what touches the database; browsers and engines are the same on both
TESTS = ["tests/orchestrator", "tests/webui"]


def _programs() -> Path | None:
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).parent if found else None


@pytest.fixture
def postgres() -> Iterator[str]:
    programs = _programs()
    if programs is None:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL is not installed; tools/system.py installs it")
        pytest.skip("PostgreSQL is not installed here, so the second database is left out")
    folder = Path(tempfile.mkdtemp(prefix="orrery-pg-"))
    become: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        become = ["runuser", "-u", "postgres", "--"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "check": True, "cwd": folder}
    subprocess.run([*become, programs / "initdb", "-D", folder / "data", "-U", "orrery", "-A", "trust", "-N"], **quiet)
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off -c full_page_writes=off"
    control = [*become, programs / "pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log"]
    subprocess.run([*control, "-o", options, "start"], **quiet)
    try:
        yield f"postgresql://orrery@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], stdout=subprocess.DEVNULL, check=False, cwd=folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(900)
def test_database_tests_pass_on_postgresql(postgres: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:randomly", *TESTS]
    environ = {**os.environ, "DATABASE_URL": postgres}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
