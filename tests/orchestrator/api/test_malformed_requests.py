"""Malformed requests to every path return problem details, never an internal error.

Each field of a body gets a third of the odd values, in turn; all with ORRERY_TEST_MATRIX=full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from tests import factories
from tests.matrix import FULL

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    10**40,
    1.5,
    "",
    "x" * 300,
    "grüße \u2603",
    "NaN",
    [],
    [1],
    {},
    {"a": {"b": [None]}},
    "1,2",
    "2026-01-01",
    "00000000-0000-0000-0000-000000000000",
    "../../etc/passwd",
    "~unknown/data.jsonl",
    "a\nb",
]


def _bodies(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[Any]:
    """Bodies that are wrong in one place, and some that are not an object at all."""
    yield from ODD
    named = schemas[
        re.sub(r".*/", "", json.dumps(schema.get("$ref") or schema["anyOf"][0]["$ref"])).strip('"')
    ]
    share = 1 if FULL else 3
    for number, field in enumerate(named["properties"]):
        for odd in ODD[number % share :: share]:
            yield {field: odd}
    for odd in ODD[:10]:
        yield {field: odd for field in named["properties"]}
    for field, part in named["properties"].items():
        inner = schemas["RunSpec"] if field == "spec" else part.get("items", {})
        for number, name in enumerate(inner.get("properties", {})):
            for odd in ODD[::2] if FULL else ODD[number % 6 :: 6]:
                item = factories.spec() if field == "spec" else {"seq": 1, "type": "x", "text": "x"}
                yield {field: item | {name: odd} if field == "spec" else [item | {name: odd}]}


@pytest.mark.django_db
def test_malformed_requests_are_refused_with_messages(
    admin: User, client: Client, settings: Any, tmp_path: Path
) -> None:
    settings.DATA_ROOTS = [tmp_path]  # only a folder that exists has names that are too long
    document = client.get("/api/v1/openapi.json").json()
    caller = factories.api(admin)
    caller.raise_request_exception = False
    run, node = factories.external_run(admin), factories.node("n1")
    known = {"id": str(run.pk), "artifact": "1", "name": "retention", "step": "4"}
    request, wrong_answers = 0, []

    def check(answer: Any, what: str) -> None:
        nonlocal request
        request += 1
        content = b"" if answer.streaming else answer.content
        if answer.status_code >= 400:
            problem = answer["Content-Type"] == "application/problem+json"
            if answer.status_code >= 500 or not problem or not answer.json()["detail"]:
                wrong_answers.append((what, answer.status_code, content[:500]))
        elif content:
            json.loads(content)

    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            others = dict.fromkeys(re.findall(r"{(\w+)}", path), "1")  # of lines and turns
            good = path.format(**(others | known | ({"id": node.name} if "nodes" in path else {})))
            for odd in ("0", "999", "-1", str(10**40), "x", "%20", "1%2f2"):
                if "{" in path:
                    wrong = re.sub(r"{\w+}", odd, path)
                    check(
                        caller.generic(method.upper(), wrong, b"{}", "application/json"),
                        f"{method} {wrong}",
                    )
            for parameter in operation["parameters"]:
                if parameter["in"] == "query":
                    for value in ODD:
                        query = {"name": "loss", parameter["name"]: str(value)}
                        check(
                            caller.get(good, query), f"{good}?{query}"
                        ) if method == "get" else None
            if "requestBody" in operation:
                shape = operation["requestBody"]["content"]["application/json"]["schema"]
                for body in _bodies(shape, document["components"]["schemas"]):
                    raw = json.dumps(body).encode()
                    check(
                        caller.generic(method.upper(), good, raw, "application/json"),
                        f"{method} {good} {raw[:200]!r}",
                    )
    assert not wrong_answers, (len(wrong_answers), wrong_answers[:20])
    assert request > 1000
    assert Run.objects.get(pk=run.pk).kind == "external"
