"""One running installation for all flows that do not stop it: a start takes longer than most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.embedded import Orrery
from tests.migrated_database import install


@pytest.fixture(scope="package")
def installation(
    tmp_path_factory: pytest.TempPathFactory, migrated_database: Path
) -> Iterator[Orrery]:
    """Two devices, no demo.

    It outlives tests that kill its parts, or all of it and start it again.
    """
    server = Orrery(tmp_path_factory.mktemp("flows") / "home", devices=2)
    try:
        install(migrated_database, server.home)
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def orrery(installation: Orrery) -> Iterator[Orrery]:
    """The shared installation with both devices free."""
    yield installation
    installation.tidy()
