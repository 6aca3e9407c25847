"""One definition per number: the same value on the run page, in the list and on Compare."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.common import clock
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.telemetry import services as telemetry
from orchestrator.telemetry.reading import totals
from orchestrator.telemetry.services import Lines
from tests import factories
from tests.webui.pages import compact
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 3, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: NOW)


def points(
    run: Run, times: list[float], *, attempt: int = 1, first: int = 1, **values: Any
) -> None:
    steps = list(range(first, first + len(times)))
    batch = PointBatch(
        run=str(run.pk),
        attempt=attempt,
        rank=0,
        seq=list(range(1, len(times) + 1)),
        step=steps,
        tokens=[64 * step for step in steps],
        time=times,
        values={name: list(each) for name, each in values.items()},
    )
    telemetry.points_store(run=run, attempt=attempt, batches=[batch])
    run.refresh_from_db()


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def paused_run(owner: Any) -> Run:
    """Two devices for 10 minutes, a pause of 40, two devices for 5 minutes until now."""
    run, node = factories.run(owner, name="stops", devices=2), factories.node("n1")
    first = factories.running(run, node)
    points(run, [ago(46).timestamp()] * 3, loss=[3.0] * 3, step_time_s=[0.2] * 3)
    times = {"created": ago(55), "started": ago(55), "ended": ago(45), "state": "exited"}
    Attempt.objects.filter(pk=first.pk).update(**times, exit_class="preempted", requested="pause")
    Run.objects.filter(pk=run.pk).update(state="queued", started=ago(55))
    run.refresh_from_db()
    second = factories.running(run, node)
    Attempt.objects.filter(pk=second.pk).update(created=ago(5), started=ago(5))
    return run


def test_paused_time_neither_runs_nor_costs(people: factories.People) -> None:
    run = paused_run(people.owner)
    client = factories.client_for(people.owner)
    page = compact(client.get(f"/runs/{run.pk}/").content.decode())
    assert "ran 15 min" in page
    row = client.get("/runs/").content.decode()
    assert re.search(r"data-growing\s*>\s*0\.500?\s*</td>", row), "2 devices for 15 minutes"
    compared = compact(client.get(f"/runs/compare/?runs={run.pk}").content.decode())
    assert re.search(r"Device-hours.*?0\.500?\b|Device-hours.*?30 min", compared)
    history = compact(client.get(f"/runs/{run.pk}/?tab=history").content.decode())
    assert '<span class="badge ">paused</span>' in history and ">preempted<" not in history
    Run.objects.filter(pk=run.pk).update(state="paused")
    assert "data-growing" not in client.get("/runs/").content.decode()


def test_a_resumed_run_and_an_idle_server_do_not_hang(people: factories.People) -> None:
    run = paused_run(people.owner)
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "may hang" not in page
    assert "Running again, attempt 2; no new step yet. Last: step 3 of 20." in page
    points(run, [ago(2).timestamp()], attempt=2, first=4, loss=[3.0], step_time_s=[0.2])
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "No step for 2 min: the run may hang." in page
    server = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    factories.running(server, factories.node("n2"))
    points(server, [ago(30).timestamp()], **{"inference/running": [0.0]})
    assert "may hang" not in client.get(f"/runs/{server.pk}/").content.decode()
    marks = re.findall(r'aria-label="(n2 device 0[^"]*)"', client.get("/").content.decode())
    assert marks and "may hang" not in marks[0]


def test_throughput_is_one_number_on_every_page(people: factories.People) -> None:
    run = factories.run(people.owner, name="one")
    factories.running(run, factories.node("n1"))
    speeds = [100.0, 1200.0, 1250.0, 1260.0, 900.0]
    points(run, [ago(5).timestamp()] * 5, tokens_per_s=speeds, mfu=[s / 5000 for s in speeds])
    telemetry.summaries_refresh(wait=False)
    Run.objects.filter(pk=run.pk).update(state="finished", ended=NOW)
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "median 1,200 tokens/s, MFU 24%" in page
    assert re.search(r"Throughput, median</span>\s*<span[^>]*><span data-value>1,200<", page)
    assert re.search(r"MFU, median</span>\s*<span[^>]*><span data-value>24%<", page)
    assert page.count(" data-median") == 2, "the script does not replace them by newest values"
    assert re.search(r'data-label="MFU" data-refresh>\s*24%', client.get("/runs/").content.decode())
    faster = factories.run(people.owner, name="newest value higher, median lower")
    factories.running(faster, factories.node("n2"))
    points(faster, [ago(5).timestamp()] * 3, mfu=[0.1, 0.1, 0.9])
    telemetry.summaries_refresh(wait=False)
    ordered = client.get("/runs/?sort=-median(mfu)").content.decode()
    assert 'aria-sort="descending"' in ordered and "Median over all steps" in ordered
    assert re.findall(r'data-label="MFU" data-refresh>\s*(\d+)%', ordered) == ["24", "10"]
    assert client.get("/runs/?query=median(mfu) > 0.2").content.decode().count("data-run=") == 1
    others = [str(factories.run(people.owner).pk) for _ in range(21)]
    for ids in ([str(run.pk)], [str(run.pk), *others]):
        compared = compact(client.get(f"/runs/compare/?runs={','.join(ids)}").content.decode())
        assert "median over all steps" in compared and "1,200" in compared and "24%" in compared


def test_a_served_reward_model_has_one_speed(people: factories.People) -> None:
    run = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    factories.running(run, factories.node("n1"))
    values = {"inference/score_s": [0.1] * 3, "inference/scores_per_s": [40.0, 44.0, 2.0]}
    points(run, [ago(5).timestamp()] * 3, **values)
    telemetry.summaries_refresh(wait=False)
    Run.objects.filter(pk=run.pk).update(state="finished", ended=NOW)
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/?tab=summary").content.decode()
    assert re.search(r"Scores, median</span>\s*<span[^>]*><span data-value>40<", page)
    row = compact(client.get("/runs/").content.decode())
    assert (
        'data-label="Scores/s" data-refresh>40 scores/s<' in row and 'class="model has-kind"' in row
    )
    assert 'name="priority"' not in page, "an ended run does not wait"
    waiting = factories.run(people.owner)
    assert 'name="priority"' in client.get(f"/runs/{waiting.pk}/").content.decode()


def test_many_compared_runs_keep_their_rows_before_summaries_are_computed(
    people: factories.People,
) -> None:
    served = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    data = {"requests": 9, "seconds": 4.0, "ttft_s": {"p50": 0.2}, "tpot_s": {"p50": 0.02}}
    runs.event_record(run=served, type="served", attempt=1, rank=0, data=data)
    trained = factories.run(people.owner)
    points(trained, [ago(5).timestamp()] * 3, loss=[3.0, 2.0, 1.5])
    ids = [served.pk, trained.pk, *(factories.run(people.owner).pk for _ in range(20))]
    client = factories.client_for(people.owner)
    page = compact(client.get(f"/runs/compare/?runs={','.join(map(str, ids))}").content.decode())
    assert "Time to first token, p50" in page and "200 ms" in page and "1.5" in page


def test_many_compared_runs_cost_no_queries_each(
    people: factories.People, django_assert_max_num_queries: Any
) -> None:
    def compared(count: int) -> str:
        ids = []
        for number in range(count):
            served = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
            for attempt, seconds in ((1, 9.0), (2, 0.2)):
                data = {"requests": 9, "seconds": 4.0, "ttft_s": {"p50": seconds + number}}
                runs.event_record(run=served, type="served", attempt=attempt, rank=0, data=data)
            ids.append(str(served.pk))
        return f"/runs/compare/?runs={','.join(ids)}"

    few, many = compared(2), compared(12)
    client = factories.client_for(people.owner)
    client.get(few)
    with CaptureQueriesContext(connection) as context:
        client.get(few)
    with django_assert_max_num_queries(len(context)):
        page = compact(client.get(many).content.decode())
    assert "200 ms" in page and "11.2 s" in page and "9.00 s" not in page


def test_compare_reads_points_of_few_runs(
    people: factories.People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(totals, "MOST_COMPUTED", 2)
    stored, first, second = (factories.run(people.owner) for _ in range(3))
    points(stored, [ago(5).timestamp()] * 3, loss=[3.0, 2.0, 1.5])
    telemetry.summaries_refresh(wait=False)
    points(stored, [ago(4).timestamp()], first=4, loss=[1.0])
    for run in (first, second):
        points(run, [ago(5).timestamp()], loss=[2.5])
    numbers = totals.current_numbers([stored, first, second])
    assert [numbers[run.pk]["loss"].last for run in (stored, first, second)] == [1.5, 2.5, 2.5]


def test_programs_of_users_have_no_model_unless_they_name_one(people: factories.People) -> None:
    external = factories.external_run(people.owner)
    script = factories.run(
        people.owner, kind="script", train=None, plan={}, script={"command": ["train.py"]}
    )
    named = runs.run_submit(
        owner=people.owner, name="named", spec={"kind": "external", "model": "llama-15m"}
    )
    assert [external.model_name, script.model_name, named.model_name] == ["", "", "llama-15m"]
    client = factories.client_for(people.owner)
    for run in (external, script):
        page = client.get(f"/runs/{run.pk}/").content.decode()
        assert "llama-tiny" not in page and "fp32" not in page.partition('class="tabs"')[0]


def test_an_external_run_lasts_as_long_as_its_points(people: factories.People) -> None:
    run = factories.external_run(people.owner)
    points(run, [1e9, 1e9 + 60, 1e9 + 600], loss=[3.0, 2.0, 1.0])
    Run.objects.filter(pk=run.pk).update(state="finished", ended=NOW)
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert "Finished 3 steps in 10 min" in page


def test_a_failed_run_shows_its_cause_first(people: factories.People) -> None:
    run = factories.run(people.owner)
    factories.running(run, factories.node("n1"))
    lines = ["starting", "Traceback (most recent call last):", "ValueError: odd <size>", "bye"]
    telemetry.logs_store(run=run, attempt=1, batches=[(0, Lines(1, 1e9, lines))])
    reason = {"class": "user_error", "reason": "ValueError: odd <size>", "rank": 0}
    Run.objects.filter(pk=run.pk).update(state="failed", ended=NOW, exit=reason)
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert page.index("Why it failed") < page.index('id="charts"')
    assert "Traceback" in page and '<li class="error">ValueError: odd &lt;size&gt;' in page
    assert "No points" in page and 'class="chart card' not in page, "no empty charts"
    assert "Why it failed" not in client.get(f"/runs/{run.pk}/?tab=config").content.decode()
    logs = compact(client.get(f"/runs/{run.pk}/?tab=logs").content.decode())
    assert '>01:46:40</time><span class="level">error</span><span class="who" title="0">0<' in logs
    assert 'id="first-cause"' in logs


def test_a_pause_by_a_person_is_no_preemption(people: factories.People) -> None:
    run = factories.run(people.owner)
    for action in ("pause", "preempt"):
        data = {"action": action, "step": 5}
        runs.event_record(run=run, type="preempted", attempt=1, rank=0, data=data, origin=action)
    page = compact(factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode())
    assert "Saved a checkpoint to pause at step 5" in page
    assert page.count("Preempted on rank 0 at step 5") == 1 + page.count('"Preempted on rank 0')
