"""The upgrade of a running cluster, component by component, with real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.cluster import ROOT
from tests.flows.embedded import clean_environ


@pytest.mark.timeout(1800)
def test_an_upgrade_starts_nothing_twice_and_loses_no_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.upgrade"],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
