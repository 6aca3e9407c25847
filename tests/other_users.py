"""Lets other Unix users start this Python, for tests of isolation that run as root.

A Python below a private folder, such as root's home, is shown to the tests' programs alone: in a
mount namespace in which that folder has only the parts that Python needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SHOW = """
mount --make-rprivate / && mkdir -p "$1/$3" && mount --bind "$2/$3" "$1/$3" &&
mount --rbind "$1" "$2" && shift 3 && exec "$@"
"""


def _private_parent(path: Path) -> Path | None:
    """The topmost parent that other users may not pass."""
    parents = reversed(path.resolve().parents)
    return next((folder for folder in parents if not folder.stat().st_mode & 0o001), None)


@pytest.fixture(scope="session")
def as_seen_by_others() -> Iterator[list[str]]:
    """A prefix for commands; skips where the tests are not root or lack tools."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    if _private_parent(ROOT / "workers") is not None:
        pytest.skip(f"other users cannot read {ROOT}")
    base = Path(sys.base_prefix).resolve()
    private = _private_parent(base / "bin")
    if private is None:
        yield []
        return
    view = Path(tempfile.mkdtemp(prefix="orrery-view-", dir="/tmp"))
    view.chmod(0o755)
    prefix = ["unshare", "--mount", "sh", "-c", _SHOW, "sh", str(view), str(private)]
    prefix += [str(base.relative_to(private))]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"other users cannot pass {private}, and there are no mount namespaces")
    yield prefix
    shutil.rmtree(view, ignore_errors=True)  # the bind mounts were in namespaces that have ended


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A folder that other users may pass, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="orrery-home-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
