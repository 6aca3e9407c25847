"""The SDK that `make sdk` generates from the OpenAPI document talks to the real API."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.handlers.wsgi import WSGIHandler

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User

TOOL = Path(__file__).resolve().parents[2] / "tools" / "sdk.py"


def test_a_generated_client_submits_lists_and_reads_errors(
    owner: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, "--out", tmp_path / "sdk"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(str(tmp_path / "sdk"))
    sdk = importlib.import_module("orrery_sdk")
    models = importlib.import_module("orrery_sdk.models")
    create = importlib.import_module("orrery_sdk.api.runs.runs_run_create")
    listing = importlib.import_module("orrery_sdk.api.runs.runs_run_list")

    settings.ALLOWED_HOSTS = ["orrery.test"]
    _, token = accounts.token_create(user=owner, name="sdk", by=owner)
    client = sdk.AuthenticatedClient(
        base_url="http://orrery.test",
        token=token,
        httpx_args={"transport": httpx.WSGITransport(app=WSGIHandler())},
    )
    train = models.TrainBody(steps=20, seq_len=64)
    spec = models.RunSpec(kind=models.RunSpecKind.TRAIN, train=train)
    run = create.sync(client=client, body=models.Submission(spec=spec, name="typed"))
    assert isinstance(run, models.RunOut), run
    assert run.name == "typed" and run.spec.train.steps == 20
    page = listing.sync(client=client, owner="me")
    assert [row.id for row in page.items] == [run.id]
    train.steps = -1
    problem = create.sync(client=client, body=models.Submission(spec=spec))
    assert isinstance(problem, models.ProblemDetails)
    assert problem.status == 422 and problem.errors[0].field == "train.steps"


def test_the_document_suits_generators_of_other_languages() -> None:
    """What openapi-typescript 7.13 needs: references that resolve, names that are unique."""
    spec = importlib.util.spec_from_file_location("sdk_tool", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    document = tool.document_of_code()
    names = [
        each["operationId"]
        for methods in document["paths"].values()
        for method, each in methods.items()
        if method in ("get", "post", "put", "patch", "delete")
    ]
    assert len(names) == len(set(names)) > 100 and all(name.isidentifier() for name in names)
    assert all(name.isidentifier() for name in document["components"]["schemas"])
    places: list[Any] = [document]
    while places:
        place = places.pop()
        if not isinstance(place, dict):
            places += place if isinstance(place, list) else []
            continue
        places += place.values()
        reference = place.get("$ref")
        if isinstance(reference, str):
            target: Any = document
            for part in reference.removeprefix("#/").split("/"):
                target = target[part]
        if "oneOf" in place or "anyOf" in place:
            assert not isinstance(place.get("default"), dict), place
