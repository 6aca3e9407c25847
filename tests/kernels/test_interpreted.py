"""Runs every Triton kernel in Triton's interpreter, in a separate process (triton reads its
variable at import).

One process runs all files of `interpreted/`, because importing torch takes longer than most of
them. It runs one shape per kernel; ORRERY_TEST_MATRIX=full runs all shapes. One file alone:
TRITON_INTERPRET=1 python -m pytest -c tests/kernels/interpreted/pytest.ini --rootdir .
tests/kernels/interpreted/X.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"
ROOT = HERE.parents[2]


@pytest.mark.timeout(1200)  # against hangs
def test_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    files = sorted(
        str(p) for p in HERE.glob("*.py") if p.name not in ("__init__.py", "conftest.py")
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            str(HERE / "pytest.ini"),
            "--rootdir",
            str(ROOT),
            *files,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    assert "skipped" not in done.stdout
