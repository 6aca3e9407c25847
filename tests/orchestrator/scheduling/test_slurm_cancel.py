"""What scancel refuses is logged; jobs that have ended are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.fleet.cluster_engines.settings import SlurmSettings
from orchestrator.scheduling.cluster_engines.slurm.engine import Slurm

# as scancel prints them
ENDED = (
    "scancel: error: Kill job error on job id 7: Job/step already completing or completed",
    "scancel: error: Kill job error on job id 8: Invalid job id specified",
)
DENIED = "scancel: error: Kill job error on job id 9: Access/permission denied"


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize(
    ("lines", "logged"),
    [((), ""), (ENDED, ""), ((*ENDED, DENIED), "job id 9: Access/permission denied")],
)
def test_a_refused_cancellation_is_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lines: tuple[str, ...],
    logged: str,
    kill: bool,
) -> None:
    program = tmp_path / "scancel"
    printed = "".join(f"echo '{line}' >&2\n" for line in lines)
    program.write_text(f"#!/bin/sh\n{printed}exit 1\n")
    program.chmod(0o755)
    engine = Slurm(SlurmSettings(commands=str(tmp_path)))
    engine.cancel(["7", "8", "9"], kill=kill)
    assert (logged in caplog.text) if logged else not caplog.text
    assert "Invalid job id" not in caplog.text
