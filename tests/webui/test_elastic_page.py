"""Pages and REST of an elastic run: its range, current size, sizes over time, waiting reason."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.fleet.models import Engine, Pool
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from tests import factories
from tests.factories import People
from webui.charts.size_steps import HEIGHT, HeldDevices, size_steps

pytestmark = pytest.mark.django_db


def elastic(people: People, **more: Any) -> Run:
    train = {"steps": 1000, "seq_len": 16, "checkpoint": {"every_steps": 5}}
    plan = {"dp": 4, "micro_batch_size": 1, "global_batch_size": 4}
    return factories.run(people.owner, plan=plan, train=train, resources={"min_devices": 1, **more})


def held(run: Run, devices: int, *, minutes: int, ended: bool = True) -> None:
    placement = [{"node": "n1", "address": "", "devices": list(range(devices)), "node_rank": 0}]
    attempt = runs.attempt_create(run=run, placement=placement)
    assert attempt is not None
    start = clock.now() - timedelta(minutes=minutes)
    Attempt.objects.filter(pk=attempt.pk).update(created=start)
    if ended:
        runs.attempt_exited(attempt=attempt, exit_class="preempted")
        Attempt.objects.filter(pk=attempt.pk).update(ended=start + timedelta(minutes=10))


def test_the_run_page_shows_range_size_and_changes(people: People) -> None:
    run, client = elastic(people), factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/?tab=history").content.decode()
    assert "Starts on the largest size from 1 to 4 devices that is free." in page
    assert "1–4 devices" in " ".join(page.split()) and "size-steps" not in page
    held(run, 4, minutes=30)
    held(run, 2, minutes=20, ended=False)
    page = " ".join(client.get(f"/runs/{run.pk}/?tab=history").content.decode().split())
    assert "Trains on 2 devices, of 1 to 4." in page
    assert "2 devices of 1–4" in page
    assert "attempt 1: 4 devices" in page and "attempt 2: 2 devices" in page
    assert page.count('class="step"') == 2


def test_sizes_are_known_before_submission(people: People) -> None:
    train = {"steps": 1000, "seq_len": 16, "checkpoint": {"every_steps": 5}}
    plan = {"dp": 4, "micro_batch_size": 1, "global_batch_size": 4}
    spec = factories.spec(plan=plan, train=train)
    api, client = factories.api(people.owner), factories.client_for(people.owner)

    def check(resources: dict[str, Any]) -> tuple[dict[str, Any], str]:
        body = {**spec, "resources": resources}
        answer = api.post("/api/v1/runs/check", {"spec": body}, content_type="application/json")
        assert answer.status_code == 200, answer.content
        typed = {"spec": json.dumps(body), "from": "json"}
        return answer.json(), client.post("/runs/check/", typed).content.decode()

    open_, page = check({})
    assert (open_["problems"], open_["sizes"], open_["possible_sizes"]) == ([], [], [1, 2, 4])
    assert "Possible sizes: 1, 2 and 4 devices." in page
    chosen, page = check({"min_devices": 2})
    assert [size["devices"] for size in chosen["sizes"]] == [4, 2]
    hint = re.search(r'data-hint-of="resources.min_devices">([^<]*)<', page)
    assert hint and re.match(r"Sizes: 2 devices \(.* per step\); 4 devices", hint[1])
    refused, page = check({"min_devices": 3})
    assert refused["possible_sizes"] == [1, 2, 4]
    assert "Use at most 2; possible sizes are 1, 2, 4." in page
    assert not Run.objects.exists()


def test_rest_gives_the_range_and_the_devices_of_attempts(people: People) -> None:
    run, api = elastic(people), factories.api(people.owner)
    fixed = factories.run(people.owner)
    held(run, 2, minutes=20, ended=False)
    document = api.get(f"/api/v1/runs/{run.pk}").json()
    sizes = document["elastic"].pop("sizes")
    assert document["elastic"] == {"min_devices": 1, "max_devices": 4, "devices": 2}
    assert [(size["devices"], size["dp"], size["accumulation"]) for size in sizes] == [
        (4, 4, 1),
        (2, 2, 2),
        (1, 1, 4),
    ]
    assert api.get(f"/api/v1/runs/{fixed.pk}").json()["elastic"] is None
    listed = {item["id"]: item for item in api.get("/api/v1/runs").json()["items"]}
    assert listed[str(run.pk)]["elastic"]["devices"] == 2
    [attempt] = api.get(f"/api/v1/runs/{run.pk}/attempts").json()["items"]
    assert attempt["devices"] == 2 and attempt["resize"] is None


def test_the_queue_shows_the_range(people: People) -> None:
    run = elastic(people)
    page = factories.client_for(people.owner).get("/queue/").content.decode()
    assert "1–4" in page
    [item] = factories.api(people.owner).get("/api/v1/queue").json()["items"]
    assert (item["run"], item["min_devices"], item["devices"]) == (str(run.pk), 1, 4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"resources": {"min_devices": 5}}, "more than the 4 devices of the plan"),
        ({"resources": {"min_devices": 3}}, "no size from 3 to 3 devices keeps global batch 4"),
        ({"train": {"steps": 5, "seq_len": 16}}, "it saves none"),
    ],
)
def test_a_range_that_cannot_work_is_refused(
    people: People, spec: dict[str, Any], message: str
) -> None:
    document = {
        "kind": "train",
        "plan": {"dp": 4, "micro_batch_size": 1, "global_batch_size": 4},
        "train": {"steps": 5, "seq_len": 16, "checkpoint": {"every_steps": 5}},
        "resources": {"min_devices": 2},
        **spec,
    }
    answer = factories.api(people.owner).post(
        "/api/v1/runs", {"name": "e", "spec": document}, content_type="application/json"
    )
    [error] = answer.json()["errors"]
    assert answer.status_code == 422 and error["field"] == "resources.min_devices"
    assert message in error["message"] and error["hint"]


def test_other_kinds_and_pools_of_engines_are_refused(people: People) -> None:
    api = factories.api(people.owner)
    Pool.objects.create(name="big", engine=Engine.objects.create(name="slurm-1"))
    with pytest.raises(Refusal, match="whose jobs have a fixed number of devices"):
        elastic(people, pool="big")
    generate = {"kind": "script", "script": {"command": ["a.py"]}, "resources": {"min_devices": 1}}
    answer = api.post(
        "/api/v1/runs", {"name": "e", "spec": generate}, content_type="application/json"
    )
    assert "only training runs" in answer.json()["errors"][0]["message"]


def test_boxes_have_the_height_of_their_devices() -> None:
    start = clock.now()
    minute = timedelta(minutes=1)
    drawn = size_steps(
        [
            HeldDevices(1, 4, start, start + 5 * minute),
            HeldDevices(2, 2, start + 6 * minute, start + 10 * minute),
        ],
        [4, 2, 1],
    )
    assert drawn is not None and size_steps([], [4]) is None
    first, second = drawn.steps
    assert first.height == pytest.approx(2 * second.height, abs=0.2)
    assert first.x + first.width < second.x and drawn.base < HEIGHT
    assert [devices for _, devices in drawn.ticks] == [1, 2, 4]
