"""Requests generated from the OpenAPI schema: every operation answers, and never with a 5xx.

ORRERY_TEST_MATRIX=full, as in `make test-all`, sends more per operation.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import urlencode

import pytest
import schemathesis
from django.test import Client
from hypothesis import HealthCheck, Phase, given, settings

from orchestrator.accounts.roles import Role
from tests import factories
from tests.matrix import FULL
from tests.orchestrator.scheduling.conftest import Broker, broker

__all__ = ["broker"]
EXAMPLES = 60 if FULL else 2
# the search enumerates plans for seconds; tests/orchestrator/planner covers its requests
SLOW = () if FULL else ("/plans/search",)


@pytest.mark.django_db
def test_no_generated_request_is_an_internal_error(broker: Broker) -> None:
    owner = factories.user("root", Role.ADMIN)
    factories.running(factories.run(owner), factories.node("n1"))
    factories.external_run(owner)
    client = factories.api(owner)
    client.raise_request_exception = False
    schema = schemathesis.openapi.from_dict(client.get("/api/v1/openapi.json").json())
    failures: list[str] = []
    sent = 0
    logging.disable(logging.CRITICAL)
    try:
        for result in schema.get_all_operations():
            operation = result.ok()
            if not any(part in operation.path for part in SLOW):
                sent += _send(operation, client, failures)
    finally:
        logging.disable(logging.NOTSET)
    assert not failures, "\n".join(failures[:20])
    assert sent > 100


def _send(operation: Any, client: Client, failures: list[str]) -> int:
    sent = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=not FULL,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        path = f"{case.formatted_path}?{urlencode(case.query or {}, doseq=True)}"
        body = json.dumps(case.body) if isinstance(case.body, dict | list | str) else ""
        answer = client.generic(case.method, path, body, content_type="application/json")
        if answer.status_code >= 500:
            failures.append(f"{answer.status_code}: {case.method} {path} {body[:600]}")

    send()
    return sent
