"""Several web processes share a port, and end with the process that started them."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.flows.embedded import clean_environ, free_port
from tests.migrated_database import install

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.flow
def test_web_processes_end_with_their_parent(tmp_path: Path, migrated_database: Path) -> None:
    port = free_port()
    environ = {**clean_environ(), "ORRERY_HOME": str(tmp_path), "ORRERY_SECRET_KEY": "x" * 50}
    (tmp_path / "static").mkdir()
    install(migrated_database, tmp_path)
    command = [sys.executable, "-m", "uvicorn", "orchestrator.config.asgi:application"]
    command += ["--port", str(port), "--workers", "2", "--log-level", "warning"]
    parent = subprocess.Popen(command, cwd=ROOT, env=environ)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline and parent.poll() is None
            try:
                url = f"http://127.0.0.1:{port}/login/"
                assert urllib.request.urlopen(url, timeout=60).status == 200
                break
            except OSError:
                time.sleep(0.2)
        children = psutil.Process(parent.pid).children()
        assert len([one for one in children if "spawn_main" in " ".join(one.cmdline())]) == 2
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, "they would hold the port"
