"""Who may import whom, held by import-linter; and that the control plane never loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_import_rules_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_control_plane_loads_no_torch() -> None:
    probe = (
        "import sys, orchestrator.config.asgi; assert 'torch' not in sys.modules, 'torch was "
        "loaded'"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_agent_and_launcher_start_without_torch_django_and_numpy() -> None:
    probe = (
        "import sys, workers.agent.__main__, workers.launcher.__main__; "
        "loaded = {'torch', 'django', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
