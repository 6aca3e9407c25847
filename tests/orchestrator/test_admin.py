"""Every page of Django's admin opens, and none writes what services must write."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.urls import reverse

from orchestrator.accounts.models import User
from tests import factories

REGISTERED = sorted(admin.site._registry, key=lambda model: model._meta.label)


@pytest.fixture
def everything(people: factories.People) -> None:
    run = factories.run(people.owner)
    factories.running(run, factories.node())
    factories.external_run(people.owner)


@pytest.mark.parametrize("model", REGISTERED, ids=lambda model: model._meta.label)
def test_lists_and_forms_open(model: type, everything: None, admin: User) -> None:
    client = factories.client_for(admin)
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
    assert client.get(reverse(f"{name}_changelist"), {"q": "a"}).status_code == 200
    match = model.objects.first()
    if match is not None:
        page = client.get(reverse(f"{name}_change", args=[match.pk]))
        assert page.status_code == 200
        assert b"join_nonces" not in page.content


def test_states_are_not_edited_by_hand(everything: None, admin: User) -> None:
    client = factories.client_for(admin)
    for name in ("runs_run", "runs_attempt", "accounts_apitoken", "accounts_auditentry"):
        assert client.get(reverse(f"admin:{name}_add")).status_code == 403


def test_others_stay_out(operator: User) -> None:
    assert factories.client_for(operator).get("/admin/").status_code == 302
