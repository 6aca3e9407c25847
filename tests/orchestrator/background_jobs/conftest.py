"""Fixtures of jobs: a run without telemetry."""

from __future__ import annotations

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from tests import factories


@pytest.fixture
def run(owner: User) -> Run:
    """An external run."""
    return factories.external_run(owner)
