"""Executes the commands of every runbook, in order, against an installation in that state."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from orchestrator.accounts.models import ApiToken, User
from orchestrator.background_jobs import running
from orchestrator.background_jobs.models import JobRun
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine, Node
from orchestrator.runs.models import Run
from orchestrator.scheduling.cluster_engines import contact
from tests import factories
from tests.deploy.test_deploy import ROOT
from tests.kubernetes.cluster import Cluster
from tests.orchestrator.scheduling.conftest import broker  # noqa: F401  (fixture)

FOLDER = ROOT / "docs" / "runbooks"
OUTSIDE = {"df", "systemctl"}  # programs of the machine
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


def commands(name: str) -> list[list[str]]:
    text = (FOLDER / f"{name}.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]


class Runbook:
    """Runs a page's commands with values for its names in capitals."""

    def __init__(self, user: User) -> None:
        self.client, self.user = factories.api(user), user
        self.after: Callable[[str], None] = lambda command: None

    def execute(self, name: str, **values: str) -> None:
        for words in commands(name):
            words = [self._filled(word, values) for word in words]
            if words[0] == "curl":
                self._request(words)
            elif words[:2] == ["python", "manage.py"]:
                call_command(*words[2:], stdout=StringIO())
            else:
                assert words[0] in OUTSIDE, words
            self.after(" ".join(words))

    def _filled(self, word: str, values: dict[str, str]) -> str:
        for name, value in values.items():
            word = re.sub(rf"\b{name}\b", value, word)
        return word

    def _request(self, words: list[str]) -> None:
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        body = words[words.index("-d") + 1] if "-d" in words else None
        path = words[-1].removeprefix("$ORRERY")
        answer = self.client.generic(method, path, body or "", content_type="application/json")
        # without a scheduler's process /health/ says so
        assert answer.status_code < 400 or path == "/health/", (words, answer.content)
        if match := re.fullmatch(r"/api/v1/jobs/(\w+)/run", path):
            row = JobRun.objects.get(pk=json.loads(answer.content)["id"])
            done = running.run_requested(row.pk)
            assert done is not None and done.state == "ok", (match[1], done)


@pytest.fixture
def runbook(admin: User) -> Runbook:
    return Runbook(admin)


def test_every_page_is_executed_and_listed() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    tests = Path(__file__).read_text()
    elsewhere = {"restore"}  # test_backup executes it
    assert all(f'execute("{page}"' in tests for page in pages - elsewhere)
    assert all(f"({page}.md)" in (FOLDER / "README.md").read_text() for page in pages)


def test_node_lost(runbook: Runbook, owner: User) -> None:
    node = factories.node("n9", devices=2)
    Node.objects.filter(pk=node.pk).update(loss_held=True)
    factories.run(owner)
    states: list[tuple[bool, bool]] = []

    def record(command: str) -> None:
        if row := Node.objects.filter(name="n9").first():
            states.append((row.loss_confirmed, row.drained))

    runbook.after = record
    runbook.execute("node-lost", NODE="n9")
    assert (True, False) in states and (True, True) in states
    assert not Node.objects.filter(name="n9").exists()


def test_disk_full(runbook: Runbook, owner: User) -> None:
    factories.run(owner)
    runbook.execute("disk-full")
    assert sorted(JobRun.objects.values_list("name", "dry_run")) == [
        ("garbage", False),
        ("garbage", True),
        ("retention", False),
        ("retention", True),
    ]


def test_redis_lost(runbook: Runbook, broker: Any) -> None:  # noqa: F811
    factories.node("n1", devices=1)
    broker.client.flushall()  # it lost its data
    runbook.execute("redis-lost")
    assert Node.objects.get(name="n1").health == Node.Health.UP


def test_upgrade(runbook: Runbook, owner: User) -> None:
    run = factories.run(owner)
    runbook.execute("upgrade")
    assert Run.objects.filter(pk=run.pk).exists()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    contact.disconnect()
    made.close()


def test_rotate_keys(
    runbook: Runbook, cluster: Cluster, settings: Any, tmp_path: Path, admin: User
) -> None:
    row = engines.engine_add(
        by=None,
        name="k8s",
        kind="kubernetes",
        settings={"image": "i", "claim": "c", "server": cluster.api.url},
        credentials={"token": "old"},
    )
    old = settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a new secret key " * 3, [old]
    (tmp_path / "token").write_text(cluster.api.token)
    tokens = ApiToken.objects.filter(user=admin).count()
    values = {"ENGINE": "k8s", "FILE": str(tmp_path / "token"), "USERNAME": admin.username}
    runbook.execute("rotate-keys", **values)
    settings.SECRET_KEY_FALLBACKS = []
    assert engines.credentials_of(Engine.objects.get(pk=row.pk)).token == cluster.api.token
    assert Engine.objects.get(pk=row.pk).status["version"] == "1.34.1"
    assert ApiToken.objects.filter(user=admin).count() == tokens + 1
