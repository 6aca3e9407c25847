"""Fixtures for all tests: five users, clients, a fake clock, a real Redis server.

`owner` and `teammate` share a team; `stranger` is in no team; `operator` and `admin` administrate.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from hypothesis import settings

from orchestrator.accounts.models import User
from tests import factories, order, tiers
from tests.migrated_database import migrated_database  # noqa: F401  (fixtures)
from tests.redis_server import redis_server, redis_url  # noqa: F401
from webui import shared_parts

# Collection creates a million objects that all stay: searching them for garbage again and again
# takes 40% of its CPU time.
gc.disable()

# Set before torch is imported; programs that tests start inherit it. Several processes with several
# threads each spin at barriers: they use twice the CPU time of one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# no test measures time; on a busy machine an example may take long
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> order.Scheduling | None:
    return order.Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return order.processes()


def pytest_itemcollected(item: pytest.Item) -> None:
    tiers.mark(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        items[:] = order.in_order(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # nor are they searched while tests run
    gc.enable()


def seed_torch() -> None:
    """The same random tensors in every run; pytest-randomly seeds `random` and numpy only."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def new_parts_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages show what a test has just written, however long a busy machine takes to read it."""
    monkeypatch.setattr(shared_parts, "FREE_S", float("inf"))


@pytest.fixture(autouse=True)
def new_failure_rates() -> None:
    """Predictions count the failures of this test, not those that a test before has cached."""
    name = "orchestrator.runs.submission.prediction.expected_restarts"
    if module := sys.modules.get(name):
        module.forget_rates()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed_torch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_torch()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fails a test that leaves torch's default process group: later tests could not start one."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left torch's default process group behind")


@pytest.fixture(scope="session")
def django_db_keepdb(request: pytest.FixtureRequest, django_db_modify_db_settings: None) -> bool:
    """Whether pytest-django uses a database that exists: a copy, if several processes test."""
    database = django_settings.DATABASES["default"]
    if "PYTEST_XDIST_WORKER" not in os.environ or not database["ENGINE"].endswith("sqlite3"):
        return bool(request.config.getvalue("reuse_db"))
    shutil.copyfile(request.getfixturevalue("migrated_database"), database["TEST"]["NAME"])
    return True


class FakeClock:
    """A clock frozen at 2026-01-01 00:00 UTC; `orchestrator.common.clock` returns its time."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def advance(self, seconds: float) -> datetime:
        self.time += timedelta(seconds=seconds)
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time that the control plane sees; `clock.advance(seconds)` moves it."""
    fake = FakeClock()
    monkeypatch.setattr("orchestrator.common.clock.timezone", fake)
    return fake


@pytest.fixture
def people(db: None) -> factories.People:
    return factories.people()


@pytest.fixture
def owner(people: factories.People) -> User:
    return people.owner


@pytest.fixture
def teammate(people: factories.People) -> User:
    return people.teammate


@pytest.fixture
def stranger(people: factories.People) -> User:
    return people.stranger


@pytest.fixture
def operator(people: factories.People) -> User:
    return people.operator


@pytest.fixture
def admin(people: factories.People) -> User:
    return people.admin


@pytest.fixture
def data_root(tmp_path: Path, settings: object) -> Path:
    """An empty folder that is allowed as a data root."""
    root = tmp_path / "data"
    root.mkdir()
    settings.DATA_ROOTS = [root]  # type: ignore[attr-defined]
    return root


@pytest.fixture
def live_redis(redis_url: str, settings: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:  # noqa: F811
    """URL of an empty real Redis that the control plane uses during the test."""
    from orchestrator.common import live
    from orchestrator.common import redis as redis_client

    monkeypatch.setattr(live, "_silent_until", 0.0)  # an earlier test may have stopped Redis
    settings.REDIS_URL = redis_url  # type: ignore[attr-defined]
    redis_client.reset()
    yield redis_url
    redis_client.reset()
