"""Fixtures of the store: a server of S3, and an open store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3_server import S3Server
from workers.store.access import Store, open_store


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> Store:
    if request.param == "s3":
        return s3.open(f"{s3.bucket()}/orrery")
    folder = tmp_path / "store"
    folder.mkdir()
    return open_store(url=str(folder))
