"""The choice of the user that runs execute under: a root agent isolates only if that works."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workers.agent import isolation
from workers.launcher.isolation.run_user import NoRunUser


def answer(monkeypatch: pytest.MonkeyPatch, code: int, stdout: str, stderr: str = "") -> None:
    """Let the agent be root, and the probe under another user end like this."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "setgroups", lambda groups: None)
    monkeypatch.setattr(subprocess, "run", run)


def test_runs_are_isolated_if_another_user_runs_the_same_python(tmp_path, monkeypatch):
    answer(monkeypatch, 0, f"{asyncio.__file__}\n")
    assert isolation.choose(tmp_path, "").report.method == "uids"


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "reason"),
    [
        (0, "/elsewhere/asyncio/__init__.py\n", "", "another user cannot read the library of"),
        (1, "/elsewhere/asyncio/__init__.py\n", "No redis", "cannot read the library of"),
        (1, "", "Traceback\nPermissionError: home", "cannot start"),
    ],
)
def test_a_python_that_another_user_cannot_use_is_not_isolated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    stdout: str,
    stderr: str,
    reason: str,
) -> None:
    answer(monkeypatch, code, stdout, stderr)
    before = tmp_path.stat().st_mode
    chosen = isolation.choose(tmp_path, "")
    assert chosen.run_as is None and reason in chosen.report.detail
    assert tmp_path.stat().st_mode == before
    with pytest.raises(NoRunUser, match="does not work on this node"):
        isolation.choose(tmp_path, "uids")
