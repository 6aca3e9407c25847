"""Runs with parameters and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of


@pytest.fixture
def runs(owner: User) -> list[Run]:
    """Four runs with learning rates; the first three have losses 3, 1 and 2 and a minimum of 0."""
    made = []
    for number, lr in enumerate((1e-3, 1e-4, 1e-2, 1e-2)):
        train = {"steps": 20, "seq_len": 64, "optimizer": {"lr": lr}}
        model = "llama-tiny" if number else "llama-15m"
        run = factories.run(owner, name=f"run {number}", train=train, model=model, tags=["all"])
        if number < 3:
            last = (3.0, 1.0, 2.0)[number]
            values: dict[str, Any] = {"loss": lambda step, last=last: last if step == 2 else 0.0}
            points = batch_of(run, [1, 2], **values)
            telemetry.points_store(run=run, attempt=1, batches=[points])
        made.append(run)
    telemetry.summaries_refresh(limit=10, wait=False)
    return made
