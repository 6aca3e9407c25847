"""The installation of Lighthouse, with a program in place of npm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.bench.bench_lighthouse import VERSION, installed

# the folder follows --prefix
NPM = """#!/bin/sh
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/node_modules/.bin"
[ -e "$NPM_FAILS" ] && exit 1
touch "$2/node_modules/.bin/lighthouse"
"""


def test_an_incomplete_installation_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made each later installation fail, and each failure left a folder."""
    npm, cache, fails = tmp_path / "bin" / "npm", tmp_path / "cache", tmp_path / "fails"
    npm.parent.mkdir()
    npm.write_text(NPM)
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("NPM_FAILS", str(fails))
    folder = cache / "orrery-bench" / f"lighthouse-{VERSION}"
    (folder / "node_modules").mkdir(parents=True)
    fails.touch()
    with pytest.raises(subprocess.CalledProcessError):
        installed()
    assert list(folder.parent.iterdir()) == [folder]
    fails.unlink()
    assert installed() == folder / "node_modules" / ".bin" / "lighthouse"
    assert installed().exists() and list(folder.parent.iterdir()) == [folder]
