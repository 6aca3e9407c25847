"""The page of engines, and what forms and run pages show of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine
from orchestrator.runs import services as runs
from orchestrator.scheduling.models import EngineJob
from tests import factories

pytestmark = pytest.mark.django_db

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: 'https://k:6443'}}]
users: [{name: u, user: {token: very-secret}}]
"""
ADDED = {
    "name": "k8s",
    "kind": "kubernetes",
    "image": "registry.example.com/node:1",
    "claim": "runs",
    "kubeconfig": KUBECONFIG,
}


@pytest.fixture
def page(admin: User) -> Client:
    client = Client()
    client.force_login(admin)
    return client


def _cluster() -> Engine:
    engine = engines.engine_add(
        by=None, name="k8s", kind="kubernetes", settings={"image": "i", "claim": "c"}
    )
    engines.engine_pool_set(engine=engine, by=None, pool="k8s-gpu", settings={"queue": "research"})
    quota = [{"resource": "memory", "used": 2**30, "total": 2**32}]
    queue = {"name": "research", "up": True, "waiting": 3, "running": 5, "quota": quota}
    queue |= {"nodes": 0, "nodes_idle": 0}
    engine.status = {"ok": True, "version": "1.34.1", "partitions": [queue]}
    engine.save()
    return engine


def test_an_administrator_adds_a_kubernetes_cluster_and_its_pool(page: Client) -> None:
    assert page.post("/engines/", ADDED).status_code == 302
    assert (
        page.post(
            "/engines/", {"engine": "k8s", "pool": "k8s-gpu", "queue": "research"}
        ).status_code
        == 302
    )
    row = Engine.objects.get()
    assert row.kind == "kubernetes" and row.pools.get().engine_settings["queue"] == "research"
    shown = page.get("/engines/").content.decode()
    assert "registry.example.com/node:1" in shown and "very-secret" not in shown
    assert "very-secret" not in row.credentials


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kubeconfig": KUBECONFIG.replace("token: very-secret", "exec: {command: x}")}, "program"),
        ({"image": ""}, "image"),
        ({"kind": "nomad"}, "nomad"),
        ({"claim": "../etc"}, "claim"),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_added(
    page: Client, change: dict[str, str], message: str
) -> None:
    answer = page.post("/engines/", {**ADDED, **change})
    assert answer.status_code == 422 and message in answer.content.decode()
    assert "very-secret" not in answer.content.decode()
    assert not Engine.objects.exists()


def test_only_another_way_to_log_in_replaces_the_stored_one(page: Client) -> None:
    page.post("/engines/", ADDED)
    settings = {"change": "k8s", "image": "i", "claim": "c"}
    certificate = "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----"

    def stored(**typed: str) -> dict[str, Any]:
        assert page.post("/engines/", {**settings, **typed}).status_code == 302
        known: dict[str, Any] = engines.credentials_of(Engine.objects.get()).to_dict()
        return {name: value for name, value in known.items() if value is not None}

    kubeconfig = {"kubeconfig": KUBECONFIG.strip()}
    broker = {"redis_url": "rediss://broker:6379/0"}
    assert stored(**broker) == {**broker, **kubeconfig}
    assert stored(ca=certificate) == {**broker, "ca": certificate}
    assert stored(token="first") == {**broker, "ca": certificate, "token": "first"}
    assert stored(token="second")["ca"] == certificate
    assert stored(**kubeconfig) == {**broker, **kubeconfig}


def test_what_was_typed_stays_in_its_form_after_a_refusal(page: Client) -> None:
    _cluster()
    typed = {"change": "k8s", "image": "typed-image", "claim": "../etc", "kubeconfig": KUBECONFIG}
    shown = page.post("/engines/", typed).content.decode()
    assert shown.count("<details open>") == 1 and "very-secret" not in shown
    assert shown.count('value="typed-image"') == 1 and 'value="../etc"' in shown
    changed = shown[: shown.index("Add a Kubernetes cluster")]
    assert 'name="ca"' in changed and changed.count("<textarea") == 2  # they have line breaks
    shown = page.post("/engines/", {"engine": "k8s", "pool": "../p", "queue": "q"}).content.decode()
    assert shown.count("<details open>") == 1 and shown.count('value="../p"') == 1
    shown = page.post("/engines/", {**ADDED, "name": "Wrong"}).content.decode()
    assert "<details open>" not in shown and shown.count('value="Wrong"') == 1


def test_queues_are_shown_with_their_quota(page: Client) -> None:
    _cluster()
    shown = page.get("/engines/").content.decode()
    assert "memory 1 of 4 GiB" in shown and "Kubernetes 1.34.1" in shown


def test_the_form_offers_pools_with_what_is_free(page: Client) -> None:
    _cluster()
    shown = page.get("/runs/new/").content.decode()
    assert 'list="pool-list"' in shown
    assert "Kubernetes k8s, queue research: 5 running, 3 waiting" in shown


def test_the_run_page_names_engine_and_job(page: Client, owner: User) -> None:
    engine = _cluster()
    spec = factories.spec(resources={"pool": "k8s-gpu"})
    run = runs.run_submit(owner=owner, name="r", spec=spec)
    [attempt] = runs.attempts_enqueue(new=[runs.NewAttempt(run, (), None)])
    job = EngineJob.objects.create(attempt=attempt, engine=engine, name="orrery-1-1-a")
    assert "Kubernetes k8s, no job yet" in page.get(f"/runs/{run.pk}/").content.decode()
    job.number = job.name
    job.save()
    assert "Kubernetes k8s, job orrery-1-1-a" in page.get(f"/runs/{run.pk}/").content.decode()


def test_the_command_reads_credentials_from_files(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "kubeconfig"
    words = ["engine", "add", "k8s", "image=i", "claim=c", "--kind", "kubernetes"]
    with pytest.raises(CommandError, match="cannot be read"):
        call_command(*words, "--kubeconfig", str(config))
    config.write_text(KUBECONFIG)
    call_command(*words, "--kubeconfig", str(config))
    assert "very-secret" not in capsys.readouterr().out
    access = engines.credentials_of(Engine.objects.get())
    assert access.kubeconfig == KUBECONFIG.strip()


def test_an_administrator_lets_slurmrestd_report_jobs(page: Client, capsys: Any) -> None:
    settings = {"rest": "https://slurm.example.com:6820", "rest_user": "orrery"}
    settings["rest_ca"] = "/etc/ssl/site-ca.pem"
    added = {"kind": "slurm", "name": "hpc", **settings, "rest_token": "SLURM_JWT=a.very.secret"}
    assert page.post("/engines/", added).status_code == 302
    engine = Engine.objects.get()
    assert settings.items() <= engine.settings.items()
    engine.status = {"ok": True, "problem": "Jobs are read by squeue, because of a reason."}
    engine.save()
    text = page.get("/engines/").content.decode()
    assert "Jobs are read by squeue, because of a reason." in text and "Problems with hpc" in text
    assert "a.very.secret" not in text

    stored = {**engine.settings, **settings, "identity": "submitter", "change": "hpc"}
    form = {name: value for name, value in stored.items() if value is not None}
    wrong = page.post("/engines/", {**form, "rest": "http://slurm.example.com"})
    assert wrong.status_code == 422 and "https://" in wrong.content.decode()
    token = {"rest_token": "a.new.one"}
    assert page.post("/engines/", {**form, "rest": "", **token}).status_code == 302
    engine.refresh_from_db()
    assert engine.settings.get("rest") is None and engine.settings.get("identity") == "submitter"
    assert engines.credentials_of(engine).rest_token == "a.new.one"
    page.post("/engines/", form)
    engine.refresh_from_db()
    assert engine.settings["rest"] and engines.credentials_of(engine).rest_token == "a.new.one"


def test_the_command_sets_and_removes_slurmrestd(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "token").write_text("SLURM_JWT=a.very.secret\n")
    words = ["rest=unix:/run/slurmrestd.socket", "--rest-token", str(tmp_path / "token")]
    call_command("engine", "add", "hpc", *words)
    assert "very" not in capsys.readouterr().out
    engine = Engine.objects.get()
    assert engines.credentials_of(engine).rest_token == "a.very.secret"
    call_command("engine", "set", "hpc", "rest=null")
    engine.refresh_from_db()
    assert engine.settings.get("rest") is None
