"""Generated samples by REST, without discarded steps."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runs import services
from orchestrator.runs.models import Run
from tests import factories

pytestmark = pytest.mark.django_db


def written(run: Run, attempt: int, step: int, text: str) -> None:
    result = {
        "step": step,
        "samples": [{"prompt": "a", "text": text, "prompt_ids": [97], "token_ids": [98]}],
    }
    services.event_record(
        run=run,
        type="samples_written",
        data=result,
        attempt=attempt,
        rank=0,
        origin=f"{attempt}/0/{step}",
    )


def match(client: Any, run: Run) -> list[tuple[int, int, str]]:
    items = client.get(f"/api/v1/runs/{run.pk}/samples").json()["items"]
    return [(item["attempt"], item["step"], item["samples"][0]["text"]) for item in items]


def test_samples_exclude_discarded_steps(people: factories.People) -> None:
    run = factories.run(people.owner)
    client = factories.api(people.owner)
    assert match(client, run) == []
    for step in (10, 20, 30):
        written(run, 1, step, "first")
    services.event_record(
        run=run, type="samples_written", data={"step": "x"}, attempt=1, rank=0, origin="1/0/99"
    )
    assert [step for _, step, _ in match(client, run)] == [10, 20, 30], (
        "events in another format are skipped"
    )
    written(run, 2, 20, "again")
    assert match(client, run) == [(1, 10, "first"), (2, 20, "again")], (
        "resumed from step 10, it continues from there"
    )
    written(run, 2, 30, "again")
    Run.objects.filter(pk=run.pk).update(rewinds=[[2, 10]])
    assert match(client, run) == [(1, 10, "first")], "discarded by a rewind"
    written(run, 3, 20, "third")
    assert match(client, run) == [(1, 10, "first"), (3, 20, "third")]
    first = client.get(f"/api/v1/runs/{run.pk}/samples?limit=1").json()
    rest = client.get(f"/api/v1/runs/{run.pk}/samples?limit=1&cursor={first['next_cursor']}").json()
    assert [first["items"][0]["step"], rest["items"][0]["step"], rest["next_cursor"]] == [
        10,
        20,
        None,
    ]
    assert factories.api(people.stranger).get(f"/api/v1/runs/{run.pk}/samples").status_code == 404
