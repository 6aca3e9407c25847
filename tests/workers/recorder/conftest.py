"""A server to record to, and a separate home for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.recorder.server import Ingest, serving


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "ORRERY_RUN_DIR",
        "ORRERY_RUN",
        "ORRERY_ATTEMPT",
        "ORRERY_URL",
        "ORRERY_TOKEN",
        "RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORRERY_CAPTURE", "0")
    monkeypatch.setenv("ORRERY_SYSTEM_S", "0")
    monkeypatch.setenv("ORRERY_SPOOL", str(tmp_path / "spool"))


@pytest.fixture
def server() -> Iterator[Ingest]:
    with serving(Ingest()) as running:
        yield running
