"""The command `orrery` against a running installation: log in, submit, watch, read, download."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.flows.embedded import ROOT, TINY, Orrery, train_spec

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]


def test_login_submit_watch_logs_and_download(orrery: Orrery, tmp_path: Path) -> None:
    assert orrery.client is not None
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ORRERY_")},
        "PYTHONPATH": str(ROOT / "deploy" / "cli"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }

    def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "orrery_cli", *arguments],
            input=stdin,
            env=environ,
            capture_output=True,
            text=True,
            timeout=400,
        )

    token = orrery.client.headers["Authorization"].removeprefix("Bearer ")
    assert command("login", orrery.url, stdin=token).returncode == 0
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(train_spec(steps=3, ranks=1, every=100)))
    watched = command("submit", str(spec), "--name", "by command", "--watch")
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert "finished: step 3/3, loss " in watched.stdout
    run = json.loads(command("runs", "--owner", "me", "--json").stdout)["items"][0]
    assert run["name"] == "by command" and run["state"] == "finished"
    assert TINY["name"] in command("runs").stdout

    logs = command("logs", run["id"], "-f")
    assert logs.returncode == 0 and "rank 0: all 3 steps done" in logs.stdout
    exported = command("download", run["id"], "--export", "-o", str(tmp_path))
    assert exported.returncode == 0, exported.stderr
    with zipfile.ZipFile(tmp_path / f"run-{run['id']}.zip") as archive:
        assert archive.read(f"run-{run['id']}/series/loss.csv").count(b"\n") == 4
