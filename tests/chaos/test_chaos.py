"""A short, seeded part of the fault injection; `make chaos` runs the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.embedded import clean_environ

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_no_invariant_is_violated_under_faults(migrated_database: Path) -> None:
    options = ["--faults=40", "--seed=7", "--nodes=2", f"--database={migrated_database}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *options],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
