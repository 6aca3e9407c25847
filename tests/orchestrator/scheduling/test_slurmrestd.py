"""Answers of slurmrestd's versions, and what an administrator sees if it cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import call_command

from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.cluster_engines.settings import Credentials, SlurmSettings
from orchestrator.fleet.models import Engine
from orchestrator.scheduling.cluster_engines import contact
from orchestrator.scheduling.cluster_engines.interface import Capacity
from orchestrator.scheduling.cluster_engines.slurm import rest
from orchestrator.scheduling.cluster_engines.slurm.commands import Commands
from orchestrator.scheduling.cluster_engines.slurm.engine import Slurm
from orchestrator.scheduling.cluster_engines.slurm.rest import RestFailed, SlurmRest
from orchestrator.scheduling.cluster_engines.sync import sync

TOKEN = "aa.bb.cc"
NUMBER = {"set": True, "infinite": False}
OLD = {
    "name": "orrery-1-1-aa",
    "job_id": 5,
    "job_state": "RUNNING",
    "state_reason": "None",
    "nodes": "n[1-2]",
    "start_time": 1795898555,
}
NEW = {
    **OLD,
    "job_state": ["RUNNING"],
    "job_id": 5,
    "start_time": {**NUMBER, "number": 1795898555},
}


def server(answers: Mapping[str, Any], sent: list[httpx.Request] | None = None) -> SlurmRest:
    """A slurmrestd with these answers: objects as JSON, or `(HTTP status, text)`."""

    def answer(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(request)
        answer = answers.get(request.url.path, (404, "Unable find requested URL."))
        if isinstance(answer, tuple):
            return httpx.Response(answer[0], text=answer[1])
        return httpx.Response(200, text=json.dumps(answer))

    made = SlurmRest("https://slurm", user="ada", token=TOKEN, timeout_s=1)
    made._client.transport = httpx.MockTransport(answer)
    return made


def openapi(*versions: str, slash: str = "") -> dict[str, Any]:
    return {"paths": {f"/slurm/{version}/jobs{slash}": {} for version in versions}}


@pytest.mark.parametrize(
    ("paths", "path", "job"),
    [
        (openapi("v0.0.37", "v0.0.38"), "/slurm/v0.0.38/jobs", OLD),
        (openapi("v0.0.40", "v0.0.99", slash="/"), "/slurm/v0.0.40/jobs/", NEW),
    ],
)
def test_the_newest_known_version_is_used_with_the_login(
    paths: dict[str, Any], path: str, job: dict[str, Any]
) -> None:
    sent: list[httpx.Request] = []
    made = server({"/openapi/v3": paths, path: {"jobs": [job, {"name": "other"}]}}, sent)
    (view,) = made.jobs()
    assert (view.number, view.phase, view.hosts) == ("5", "active", ("n1", "n2"))
    assert {request.headers["X-SLURM-USER-TOKEN"] for request in sent} == {TOKEN}
    assert {request.headers["X-SLURM-USER-NAME"] for request in sent} == {"ada"}
    made.jobs()
    assert len(sent) == 3, "the version is discovered once"


@pytest.mark.parametrize(
    ("state", "phase", "word"),
    [
        (["CANCELLED", "COMPLETING"], "active", "COMPLETING"),
        (["PENDING", "REQUEUED"], "pending", "REQUEUED"),
        (["PENDING"], "pending", "PENDING"),
        (["PREEMPTED"], "ended", "PREEMPTED"),
        ("OUT_OF_MEMORY", "ended", "OUT_OF_MEMORY"),
    ],
)
def test_states_are_those_of_squeue(state: Any, phase: str, word: str) -> None:
    start = {"set": False, "infinite": False, "number": 0}
    (view,) = rest.views({"jobs": [{**NEW, "job_state": state, "start_time": start}]})
    assert (view.phase, view.state, view.expected_start) == (phase, word, None)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/openapi/v3": openapi("v0.0.99")}, "offers v0.0.99; this release reads v0.0.36 to"),
        ({"/openapi/v3": {"paths": {}}}, "offers no version of its jobs"),
        ({"/openapi/v3": (401, "Authentication failure")}, "refuses the login: HTTP 401"),
        ({"/openapi/v3": (502, "<html>")}, "without JSON"),
        ({}, "Check `rest` of the engine"),
        ({"/openapi/v3": openapi("v0.0.38"), "/slurm/v0.0.38/jobs": {}}, "has no jobs"),
        (
            {
                "/openapi/v3": openapi("v0.0.38"),
                "/slurm/v0.0.38/jobs": {"errors": [{"error": "Unable to contact controller"}]},
            },
            "Unable to contact controller",
        ),
        (
            {
                "/openapi/v3": openapi("v0.0.38"),
                "/slurm/v0.0.38/jobs": {
                    "jobs": [{**OLD, "job_state": {"new": "shape"}, "job_id": "5"}]
                },
            },
            "without number or state",
        ),
    ],
)
def test_what_cannot_be_used_is_reported_and_tried_again_later(
    answers: Mapping[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[httpx.Request] = []
    made = server(answers, sent)
    with pytest.raises(RestFailed, match=message):
        made.jobs()
    assert message in made.problem
    count = len(sent)
    with pytest.raises(RestFailed):
        made.jobs()
    assert len(sent) == count, "a failed server is left alone for a while"
    monkeypatch.setattr(made, "_retry_at", 0.0)
    with pytest.raises(RestFailed):
        made.jobs()
    assert len(sent) > count


@pytest.mark.django_db
@pytest.mark.usefixtures("broker")
def test_the_engine_shows_the_problem_until_slurmrestd_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"rest": "https://slurm", "rest_user": "ada"}
    monkeypatch.setattr(contact, "_read_at", {})
    row = engines.engine_add(
        by=None, name="hpc", settings=settings, credentials={"rest_token": f"SLURM_JWT={TOKEN}"}
    )
    assert engines.credentials_of(row).rest_token == TOKEN and TOKEN not in row.credentials
    port = contact.connect(row)
    assert isinstance(port, Slurm) and contact.connect(row) is port, "the version stays known"
    monkeypatch.setattr(Slurm, "capacity", lambda self: Capacity("22.05.8"))
    monkeypatch.setattr(port._commands.__class__, "run", lambda self, *words, **more: "")
    for paths, problem in (
        (openapi("v0.0.99"), "Jobs are read by squeue, because slurmrestd"),
        (openapi("v0.0.38"), ""),
    ):
        port._rest = server({"/openapi/v3": paths, "/slurm/v0.0.38/jobs": {"jobs": []}})
        assert sync(row, port)
        shown = engines.serialize_engine(Engine.objects.get(pk=row.pk))
        assert shown["ok"] and shown["problem"].startswith(problem)
        assert bool(shown["problem"]) is bool(problem)
    contact.disconnect(row.pk)


@pytest.mark.django_db
@pytest.mark.usefixtures("broker")
def test_the_command_that_checks_shows_the_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = engines.engine_add(by=None, name="hpc", settings={"rest": f"unix:{tmp_path}/none"})
    monkeypatch.setattr(contact, "_read_at", {})
    row.status = {"problem": "an old one"}
    row.save()
    monkeypatch.setattr(Slurm, "capacity", lambda self: Capacity("22.05.8"))
    monkeypatch.setattr(Commands, "run", lambda self, *words, **more: "")
    call_command("engine", "check", "hpc")
    shown = json.loads(capsys.readouterr().out)
    assert "Jobs are read by squeue, because slurmrestd at unix:" in shown["problem"]
    assert shown["ok"]
    port = contact.connect(row)
    assert isinstance(port, Slurm)
    port._rest = None
    contact.refresh(row, port, force=True)
    row.refresh_from_db()
    assert row.status["problem"], "another process has not read jobs yet"
    contact.disconnect(row.pk)


@pytest.mark.django_db
@pytest.mark.usefixtures("broker")
def test_a_new_token_leaves_the_brokers_url_and_the_other_way_round() -> None:
    row = engines.engine_add(by=None, name="hpc", credentials={"redis_url": "rediss://a:6379/0"})
    engines.engine_update(engine=row, by=None, credentials={"rest_token": TOKEN})
    engines.engine_update(engine=row, by=None, credentials={"redis_url": "rediss://b:6379/0"})
    stored = engines.credentials_of(row)
    assert (stored.redis_url, stored.rest_token) == ("rediss://b:6379/0", TOKEN)
    with pytest.raises(ValueError):
        Credentials.from_dict({"rest_token": "no token\r\nX-Evil: 1"})


@pytest.mark.parametrize(
    "address",
    [
        "unix:/run/slurmrestd.sock",
        "https://slurm.example.com:6820",
        "http://127.0.0.1:6820/",
        "http://localhost",
        "http://[::1]:6820",
    ],
)
def test_a_token_is_sent_with_tls_or_to_this_machine(address: str) -> None:
    assert SlurmSettings.from_dict({"rest": address}).rest == address.rstrip("/")


@pytest.mark.parametrize(
    "address",
    [
        "http://slurm.example.com:6820",
        "http://localhost.evil.example:6820",
        "http://127.0.0.1@evil.example:6820",
        "http://127.0.0.1.evil.example",
        "http://localhost:6820@evil.example",
        "http://evil.example\\@127.0.0.1",
        "http://[::1].evil.example",
        "https://ada:secret@slurm.example.com",
        "https://",
        "https://:6820",
        "https://slurm.example.com:port",
        "https://slurm .example.com",
        "unix://evil.example/socket",
        "ftp://localhost",
    ],
)
def test_other_addresses_of_slurmrestd_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not unix:/PATH"):
        SlurmSettings.from_dict({"rest": address})
