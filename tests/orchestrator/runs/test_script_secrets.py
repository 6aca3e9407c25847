"""Secret variables of scripts: encrypted, never shown, still there for retries and clones."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest
from django.apps import apps
from django.core import serializers as django_serializers
from django.db import connection

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Run, RunEvent, RunSecret
from orchestrator.scheduling import celery_client, dispatch
from tests import factories
from workers.contracts.wire import encrypted_text, envelope, names
from workers.contracts.wire.node_messages import LaunchOrder

VALUE, TOKEN = "hush-4711", "token-0815"
SPEC: dict[str, Any] = {
    "kind": "script",
    "script": {
        "command": ["true"],
        "env": {"FLAVOUR": "plain", "HF_TOKEN": TOKEN},
        "secrets": {"SPICE": VALUE},
    },
    "resources": {"devices": 1},
}


@pytest.fixture
def people(db: None) -> factories.People:
    return factories.people()


@pytest.fixture
def run(people: factories.People) -> Run:
    return services.run_submit(owner=people.owner, name="secretive", spec=SPEC)


def sent_orders(monkeypatch: pytest.MonkeyPatch) -> list[celery_client.Order]:
    sent: list[celery_client.Order] = []
    monkeypatch.setattr(celery_client, "send", sent.extend)
    return sent


def variables(order: celery_client.Order, node: Any) -> dict[str, str]:
    """What the node's supervisor decrypts."""
    key = fleet.node_secret(node)
    body = envelope.open_envelope(key, order.envelope, kind=names.KIND_LAUNCH, now=0.0)
    launch = LaunchOrder.from_dict(body)
    return {
        name: encrypted_text.decrypt(key, text, purpose=launch.secret_purpose)
        for name, text in launch.secrets.items()
    }


def test_no_answer_page_event_or_row_has_the_value(run: Run, people: factories.People) -> None:
    stored = f"stored in run {run.pk}"
    assert run.spec["script"] == {
        "command": ["true"],
        "env": {"FLAVOUR": "plain"},
        "secrets": {"HF_TOKEN": stored, "SPICE": stored},
    }
    client = factories.client_for(people.owner)
    api = factories.api(people.owner)
    texts = [
        api.get(f"/api/v1/runs/{run.pk}").content.decode(),
        api.get(f"/api/v1/runs/{run.pk}/events").content.decode(),
        client.get(f"/runs/{run.pk}/?tab=config").content.decode(),
        client.get(f"/runs/new/?like={run.pk}").content.decode(),
        json.dumps(list(AuditEntry.objects.values_list("data", flat=True))),
        json.dumps(list(RunEvent.objects.values_list("data", flat=True))),
        django_serializers.serialize("json", [run, *RunSecret.objects.all()]),
    ]
    assert "SPICE" in texts[0] and stored in texts[3]
    for text in texts:
        assert VALUE not in text and TOKEN not in text


def test_ranks_get_the_values_through_an_order_that_does_not_show_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = factories.node()
    attempt = services.attempt_create(run=run, placement=factories.placement(node))
    assert attempt is not None
    sent = sent_orders(monkeypatch)
    assert dispatch.launch(attempt)
    assert VALUE not in sent[0].envelope and TOKEN not in sent[0].envelope
    assert variables(sent[0], node) == {"HF_TOKEN": TOKEN, "SPICE": VALUE}


def test_clones_and_forks_of_the_owner_keep_the_values(
    run: Run, people: factories.People, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = services.run_clone(run=run, by=people.owner)
    again = services.run_submit(owner=people.owner, name="by REST", spec=clone.spec)
    result = selectors.script_secrets_of([clone, again])
    assert result[clone.pk] == result[again.pk] == {"HF_TOKEN": TOKEN, "SPICE": VALUE}
    assert again.spec["script"]["secrets"]["SPICE"] == f"stored in run {again.pk}"
    changed = services.run_clone(
        run=run, by=people.owner, changes={"script": {"secrets": {"SPICE": "new"}}}
    )
    assert selectors.script_secrets_of([changed])[changed.pk] == {
        "HF_TOKEN": TOKEN,
        "SPICE": "new",
    }


@pytest.mark.parametrize("who", ["teammate", "operator"])
def test_others_who_clone_a_run_must_enter_the_values(
    run: Run, people: factories.People, who: str
) -> None:
    by: User = people.teammate if who == "teammate" else factories.user("chief", Role.OPERATOR)
    with pytest.raises(Refusal) as caught:
        services.run_clone(run=run, by=by)
    assert {error["field"] for error in caught.value.errors} == {
        "script.secrets.HF_TOKEN",
        "script.secrets.SPICE",
    }
    assert VALUE not in str(caught.value.errors)
    assert Run.objects.count() == 1


def test_a_rotated_key_still_reads_and_the_job_renews(
    run: Run, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another key", [before]
    assert selectors.script_secrets_of([run])[run.pk] == {"HF_TOKEN": TOKEN, "SPICE": VALUE}
    assert services.script_secrets_renew(dry_run=True) == 2
    assert services.script_secrets_renew(dry_run=False) == 2
    assert services.script_secrets_renew(dry_run=False) == 0
    settings.SECRET_KEY_FALLBACKS = []
    assert selectors.script_secrets_of([run])[run.pk] == {"HF_TOKEN": TOKEN, "SPICE": VALUE}


def test_unreadable_secrets_end_the_run_with_a_reason(
    run: Run, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = factories.node()
    attempt = services.attempt_create(run=run, placement=factories.placement(node))
    assert attempt is not None
    settings.SECRET_KEY = "another key, without the earlier one"
    sent = sent_orders(monkeypatch)
    dispatch.launch(attempt)
    run.refresh_from_db()
    assert not sent and run.state == "failed"
    assert run.exit is not None and "ORRERY_SECRET_KEY_FALLBACKS" in run.exit["reason"]


def test_only_names_of_secrets_are_moved_out_of_env(people: factories.People) -> None:
    plain = {
        "TOKENIZERS_PARALLELISM": "false",
        "MONKEY": "1",
        "KEYBOARD": "de",
        "PASSES": "3",
        "EMPTY_TOKEN": "",
    }
    secret = {"API_KEY": "1", "PGPASSWORD": "2", "aws_secret_access_key": "3", "X_CREDENTIALS": "4"}
    spec = {"kind": "script", "script": {"command": ["true"], "env": {**plain, **secret}}}
    run = services.run_submit(owner=people.owner, name="names", spec=spec)
    assert run.spec["script"]["env"] == plain
    assert set(run.spec["script"]["secrets"]) == set(secret)


@pytest.mark.parametrize("name", ["", "A=B", "A\0", "x" * 201])
def test_a_variable_that_cannot_exist_is_refused(people: factories.People, name: str) -> None:
    for field in ("env", "secrets"):
        spec = {"kind": "script", "script": {"command": ["true"], field: {name: "1"}}}
        with pytest.raises(Refusal) as caught:
            services.run_submit(owner=people.owner, name="x", spec=spec)
        assert [error["field"] for error in caught.value.errors] == [f"script.{field}"]


def test_values_of_earlier_versions_are_encrypted(run: Run) -> None:
    RunSecret.objects.all().delete()
    Run.objects.filter(pk=run.pk).update(spec=SPEC)
    migration = import_module("orchestrator.runs.migrations.0007_encrypt_script_secrets")
    migration.encrypt(apps, connection.schema_editor())
    run.refresh_from_db()
    assert VALUE not in json.dumps(run.spec) and TOKEN not in json.dumps(run.spec)
    assert selectors.script_secrets_of([run])[run.pk] == {"HF_TOKEN": TOKEN, "SPICE": VALUE}


def test_a_node_of_the_previous_release_gets_no_secrets(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = factories.node()
    Node.objects.update(release="0.1", wire="1.0")
    attempt = services.attempt_create(run=run, placement=factories.placement(node))
    assert attempt is not None
    sent = sent_orders(monkeypatch)
    dispatch.launch(attempt)
    attempt.refresh_from_db()
    assert not sent and attempt.exit_class == "infrastructure"
    assert "which cannot receive secret variables" in attempt.exit["reason"]
