"""What the recorder's integrations send for real Trainers is stored and shown by the REST API."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import factories
from tests.workers.recorder.server import LISTS, TOKEN, Ingest, serving
from workers.recorder.orrery_lightning import OrreryLogger

pytestmark = pytest.mark.django_db
CALLS = Path(__file__).parents[2] / "workers" / "recorder" / "recorded" / "lightning.jsonl"


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server to record to, that only stores requests."""
    monkeypatch.delenv("ORRERY_RUN_DIR", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in (("CAPTURE", "0"), ("SYSTEM_S", "0"), ("SPOOL", str(tmp_path))):
        monkeypatch.setenv(f"ORRERY_{name}", value)
    with serving(Ingest()) as server:
        yield server


def stored(client: Any, sent: Ingest) -> dict[str, Any]:
    """The run that the API has after the same requests."""
    answer = client.post("/api/v1/runs", sent.runs["r1"], content_type="application/json")
    assert answer.status_code == 201, answer.content
    path = f"/api/v1/runs/{answer.json()['id']}"
    for kind, key in LISTS.items():
        items = list(sent.store["r1"][kind].values())
        if items:
            answer = client.post(f"{path}/{kind}", {key: items}, content_type="application/json")
            assert answer.json()["accepted"] == len(items), answer.content
    client.post(f"{path}/finish", sent.ends["r1"], content_type="application/json")
    return {**client.get(path).json(), "path": path}


def test_the_calls_of_lightnings_trainer_are_recorded(
    owner: Any, live_redis: str, sent: Ingest
) -> None:
    """`recorded/record_lightning.py` recorded them with the real Trainer."""
    about, *calls = [json.loads(line) for line in CALLS.read_text().splitlines()]
    assert about["client"] == "lightning"
    logger = OrreryLogger(sent.url, TOKEN, "lightning")
    for each in calls:
        if "read" in each:
            getattr(logger, each["read"])
            continue
        given = [
            SimpleNamespace(**value["attributes"])
            if isinstance(value, dict) and "attributes" in value
            else value
            for value in each["given"]
        ]
        getattr(logger, each["call"])(*given, **each["named"])
    client = factories.api(owner)
    run = stored(client, sent)
    assert run["state"] == "finished" and run["tags"] == ["lightning"]
    assert client.get(f"{run['path']}/details").json()["config"] == {"lr": 0.1, "layers": 2}
    for name, steps in (("loss", 8), ("lr", 8), ("val_loss", 2), ("train_loss_epoch", 2)):
        series = client.get(f"{run['path']}/series?name={name}").json()
        assert len(series["x"]) == steps, name
    saved = client.get(f"{run['path']}/events?type=checkpoint_saved").json()["items"]
    assert [each["data"]["path"] for each in saved] == [
        "epoch=0-step=4.ckpt",
        "epoch=1-step=8.ckpt",
    ]
    listed = client.get("/api/v1/runs", {"query": "config.layers = 2"}).json()["items"]
    assert [each["id"] for each in listed] == [str(run["id"])]


def test_unknown_fields_of_a_spec_are_named(owner: Any) -> None:
    """The recorder leaves out the fields that the refusal names, and no others."""
    spec = {"kind": "external", "learning_rate": 1, "tags": ["a"], "resources": {"gpus": 8}}
    answer = factories.api(owner).post(
        "/api/v1/runs", {"name": "x", "spec": spec}, content_type="application/json"
    )
    assert answer.status_code == 422
    assert {each["field"] for each in answer.json()["errors"]} == {
        "learning_rate",
        "resources.gpus",
    }
