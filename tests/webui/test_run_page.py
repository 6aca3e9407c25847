"""Run page and overview as rendered by the server: texts, access, query counts, page sizes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from orchestrator.telemetry.services import Lines
from tests import factories
from webui.presentation.run_facts import TAB_TITLES
from workers.contracts.wire.points import PointBatch

MOST_QUERIES = 14
MOST_BYTES = 150_000

pytestmark = pytest.mark.django_db


def points(run: Run, steps: range, ranks: int = 2) -> None:
    names = (
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "mfu",
        "step_time_s",
        "data_time_s",
        "memory/params_bytes",
    )
    for rank in range(ranks):
        values = {name: [1.0] * len(steps) for name in names}
        batch = PointBatch(
            run=str(run.pk),
            attempt=1,
            rank=rank,
            seq=list(steps),
            step=list(steps),
            tokens=[64 * step for step in steps],
            time=[time.time()] * len(steps),
            values=values,
        )
        telemetry.points_store(run=run, attempt=1, batches=[batch])


@pytest.fixture
def run(people: factories.People) -> Run:
    made = factories.run(people.owner, name="a run <b>of</b> mine", devices=2)
    factories.running(made, factories.node("n1"))
    return made


def queries_of(client: Any, url: str) -> tuple[Any, int]:
    with CaptureQueriesContext(connection) as caught:
        response = client.get(url)
    return response, len(caught)


@pytest.mark.usefixtures("outages_known")
def test_a_long_run_costs_few_queries_and_a_small_page(people: factories.People, run: Run) -> None:
    client = factories.client_for(people.owner)
    for tab in TAB_TITLES:  # templates are loaded
        assert client.get(f"/runs/{run.pk}/?tab={tab}").status_code == 200
    for start in range(1, 4001, 1000):
        points(run, range(start, start + 1000))
    for step in range(0, 4000, 10):
        runs.event_record(
            run=run,
            type="checkpoint_saved",
            data={"step": step},
            attempt=1,
            rank=0,
            origin=f"1/0/{step}",
        )
    lines = [
        f"a line of some length with step {n} and little else, again and again" for n in range(3000)
    ]
    telemetry.logs_store(
        run=run,
        attempt=1,
        batches=[(rank, Lines(first_seq=1, time=1e9, lines=lines)) for rank in (0, 1)],
    )
    for tab in TAB_TITLES:
        response, queries = queries_of(client, f"/runs/{run.pk}/?tab={tab}")
        assert response.status_code == 200, tab
        assert queries <= MOST_QUERIES, tab
        assert len(response.content) <= MOST_BYTES, tab


def test_names_are_text_and_never_markup(people: factories.People, run: Run) -> None:
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert "a run &lt;b&gt;of&lt;/b&gt; mine" in page and "<b>of</b>" not in page


def test_who_may_see_and_who_may_act(people: factories.People, run: Run) -> None:
    assert b'value="cancel"' in factories.client_for(people.owner).get(f"/runs/{run.pk}/").content
    teammate = factories.client_for(people.teammate)
    assert b'value="cancel"' not in teammate.get(f"/runs/{run.pk}/").content
    refused = teammate.post(f"/runs/{run.pk}/act/", {"action": "cancel"}, follow=True)
    assert b"operators of a shared team can manage it" in refused.content
    run.refresh_from_db()
    assert run.state == "running"
    stranger = factories.client_for(people.stranger)
    for address in (f"/runs/{run.pk}/", f"/runs/{run.pk}/pulse/"):
        assert stranger.get(address).status_code == 404


def test_actions_show_a_message(people: factories.People, run: Run) -> None:
    client = factories.client_for(people.owner)
    answer = client.post(
        f"/runs/{run.pk}/act/", {"action": "priority", "priority": "7"}, follow=True
    )
    assert b"Priority is now 7." in answer.content
    answer = client.post(f"/runs/{run.pk}/act/", {"action": "clone"}, follow=True)
    made = Run.objects.latest("id")
    assert f"Run {made.pk}, a clone of run {run.pk}.".encode() in answer.content
    client.post(f"/runs/{run.pk}/act/", {"action": "cancel"})
    run.refresh_from_db()
    assert (run.state, run.requested) == ("stopping", "cancel")
    assert client.post(f"/runs/{run.pk}/act/", {"action": "explode"}).status_code == 422
    assert client.get(f"/runs/{run.pk}/act/").status_code == 405


def test_the_pulse_returns_headline_state_and_marks(people: factories.People, run: Run) -> None:
    points(run, range(1, 6))
    runs.event_record(
        run=run,
        type="non_finite",
        data={"step": 3, "what": "loss"},
        attempt=1,
        rank=0,
        origin="1/0/1",
    )
    answer = factories.client_for(people.owner).get(f"/runs/{run.pk}/pulse/").json()
    assert answer["run_state"] == "running" and answer["part"] == "25.0"
    assert answer["sentence"].startswith("Step 5 of 20, loss 1.000")
    assert [mark["text"] for mark in answer["marks"]] == [
        "Non-finite value: loss on rank 0 at step 3"
    ]


def test_the_page_contains_its_data_position_and_no_foreign_url(
    people: factories.People, run: Run
) -> None:
    points(run, range(1, 6))
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    source = json.loads(
        page.split('<script id="run-source" type="application/json">')[1].split("</script>")[0]
    )
    assert source["after"] > 0 and source["epoch"] and source["per_step"]["tokens"] == 4 * 64
    assert "//" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        "://testserver", ""
    )


def test_logs_group_ranks_and_show_the_first_error(people: factories.People, run: Run) -> None:
    for rank in (0, 1):
        lines = Lines(
            first_seq=1,
            time=1e9,
            lines=[f"[rank{rank}]: loading", f"[rank{rank}]: ValueError: odd <head>"],
        )
        telemetry.logs_store(run=run, attempt=1, batches=[(rank, lines)])
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/?tab=logs").content.decode()
    assert (
        page.count("loading") == 1
        and "0–1" in page
        and "odd &lt;head&gt;" in page
        and "First error" in page
    )
    assert "No line matches" in client.get(f"/runs/{run.pk}/?tab=logs&q=absent").content.decode()


def test_the_overview_describes_the_fleet_in_one_line(
    people: factories.People, run: Run, live_redis: str
) -> None:
    page = factories.client_for(people.owner).get("/").content.decode()
    assert "0 of 4 devices busy, 1 run, none waiting" in page
    assert "My runs" in page and f'data-run="{run.pk}"' in page
    stranger_page = factories.client_for(people.stranger).get("/").content.decode()
    assert (
        "Active runs" in stranger_page
        and "No active runs" in stranger_page
        and "mine" not in stranger_page
    )


def test_an_empty_state_names_the_next_action(people: factories.People, live_redis: str) -> None:
    assert "Add a node" in factories.client_for(people.admin).get("/").content.decode()
    assert "Ask an operator" in factories.client_for(people.owner).get("/").content.decode()


def test_the_gallery_shows_everything(people: factories.People) -> None:
    page = factories.client_for(people.stranger).get("/gallery/").content.decode()
    for word in (
        "queued",
        "cancelled",
        "drained",
        "Waiting for 4 devices",
        "Failed at step 12",
        "Not finite",
    ):
        assert word in page
    for word in (
        "Arrival skew of 256 ranks",
        "Current expert loads",
        "Pipeline of step 40",
        "No prediction for this plan",
    ):
        assert word in page


def test_a_run_is_forked_and_rewound_from_its_page(people: factories.People) -> None:
    run = factories.run(people.owner, train={"steps": 200, "seq_len": 64})
    attempt = factories.running(run, factories.node())
    for step in (50, 100):
        path = f"runs/{run.pk}/checkpoints/step-{step:08d}"
        runs.checkpoint_record(run=run, attempt=1, step=step, path=path, tokens=step, bytes=1)
    client = factories.client_for(people.owner)
    tab = client.get(f"/runs/{run.pk}/?tab=checkpoints").content.decode()
    assert (
        f"/runs/{run.pk}/fork/?step=100" in tab
        and 'value="rewind"' not in tab
        and "Pause or cancel this run" in tab
    )
    form = client.get(f"/runs/{run.pk}/fork/?step=50").content.decode()
    assert '<option value="50" selected>' in form and 'value="200"' in form
    sent = {"step": "50", "steps": "40", "plan": '{"dp": 2', "changes": ""}
    broken = client.post(f"/runs/{run.pk}/fork/", sent)
    assert broken.status_code == 422 and b"invalid JSON" in broken.content
    sent |= {"plan": '{"dp": 2, "zero": 3, "global_batch_size": 4, "micro_batch_size": 2}'}
    assert b"all 40 steps are done by step 50" in client.post(f"/runs/{run.pk}/fork/", sent).content
    sent |= {"steps": "400", "lr": "0.01", "changes": '{"train": {"clip_norm": 1.0}}'}
    answer = client.post(f"/runs/{run.pk}/fork/", sent, follow=True)
    made = Run.objects.latest("id")
    assert f"continues from step 50 of run {run.pk}".encode() in answer.content
    train = made.spec["train"]
    assert (train["steps"], train["optimizer"]["lr"], train["clip_norm"], made.plan["zero"]) == (
        400,
        0.01,
        1.0,
        3,
    )
    for page in (
        client.get(f"/runs/{run.pk}/?tab=history"),
        client.get(f"/runs/{run.pk}/?tab=checkpoints"),
    ):
        assert f'href="/runs/{made.pk}/"'.encode() in page.content, "the parent names its fork"
    assert (
        f"run {run.pk}</a> at step 50".encode()
        in client.get(f"/runs/{made.pk}/?tab=history").content
    )

    runs.attempt_exited(attempt=attempt, exit_class="user_error", exit={"reason": "wrong"})
    assert b'value="rewind"' in client.get(f"/runs/{run.pk}/?tab=checkpoints").content
    answer = client.post(f"/runs/{run.pk}/act/", {"action": "rewind", "step": "50"}, follow=True)
    assert b"Rewound; the run continues from step 50." in answer.content


@pytest.mark.usefixtures("outages_known")
def test_engine_metrics_are_on_their_tabs(people: factories.People) -> None:
    plan = {"dp": 1, "pp": 2, "micro_batch_size": 1, "global_batch_size": 4}
    run = factories.run(people.owner, plan=plan, devices=2)
    factories.running(run, factories.node("n1"))
    client = factories.client_for(people.owner)
    empty = client.get(f"/runs/{run.pk}/?tab=numerics").content.decode()
    assert "No step logged yet." in empty and "No data yet" in empty
    assert "Predicted pipeline" in client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    assert client.get(f"/runs/{run.pk}/timeline/").status_code == 204
    steps = list(range(1, 41))
    for rank in (0, 1):
        values = {
            "loss": 2.0,
            "loss_scale": 1024.0,
            "comm/arrival_skew_s": 0.2 * rank,
            "step_time_s": 0.5,
            "grad_norm/layer_0": 0.02,
            "grad_norm/embedding": 0.5,
            "weight_norm/layer_0": 3.0,
            "comm/send_bytes": 1e6,
            "grad_underflow/layer_0": 0.2,
            "moe/load/0/0": 1.5,
            "moe/load/0/1": 0.5,
        }
        batch = PointBatch(
            run=str(run.pk),
            attempt=1,
            rank=rank,
            seq=steps,
            step=steps,
            tokens=steps,
            time=[1e9 + step for step in steps],
            values={name: [value] * len(steps) for name, value in values.items()},
        )
        telemetry.points_store(run=run, attempt=1, batches=[batch])
        actions = [["F", rank, 0, 0.1 * rank, 0.1 * rank + 0.1], ["B", rank, 0, 0.3, 0.5]]
        data = {
            "step": 40,
            "stages": [rank],
            "pp_rank": rank,
            "began_s": 1e9,
            "span_s": 0.5,
            "actions": actions,
            "bubble_fraction": 0.4,
        }
        runs.event_record(
            run=run, type="pipeline_timeline", data=data, attempt=1, rank=rank, origin=f"1/{rank}/1"
        )
    late = {"step": 20, "node": "n1", "stage": 1, "message": "it arrives 200 ms after them"}
    runs.event_record(run=run, type="straggler", data=late, attempt=1, rank=1, origin="1/-1/1")

    page, queries = queries_of(client, f"/runs/{run.pk}/?tab=performance")
    text = page.content.decode()
    assert queries <= MOST_QUERIES
    assert "Pipeline of step 40" in text and "The bubble is 40% of the step" in text
    assert (
        "Slow rank 1 (n1, stage 1) at step 20" in text and "Communication per rank and step" in text
    )
    assert f"/runs/{run.pk}/heat/?of=skew" in text
    assert "Pipeline timeline" not in client.get(f"/runs/{run.pk}/").content.decode()
    skew = client.get(f"/runs/{run.pk}/heat/?of=skew").content.decode()
    assert "Rank 1 (node n1, stage 1) arrives 200 ms after the first, 40% of a step" in skew
    newest = client.get(f"/runs/{run.pk}/timeline/")
    assert newest.status_code == 200 and "Pipeline of step 40" in newest.content.decode()
    numerics = client.get(f"/runs/{run.pk}/?tab=numerics").content.decode()
    assert "The loss scale is 1,024 and has not changed" in numerics
    words = {
        "gradients": "The largest norm is 0.500, in embedding",
        "weights": "Layer 0 changed most, from 3 to 3",
        "underflow": "Layer 0 loses 20%",
        "loads": "1.50 times the even load",
        "experts": "expert 1",
    }
    for of, word in words.items():
        assert (
            f"of={of}" in numerics
            and word in client.get(f"/runs/{run.pk}/heat/?of={of}").content.decode()
        )
    assert client.get(f"/runs/{run.pk}/heat/?of=nothing").status_code == 422
    assert (
        factories.client_for(people.stranger).get(f"/runs/{run.pk}/heat/?of=skew").status_code
        == 404
    )


@pytest.mark.usefixtures("outages_known")
def test_sample_texts_are_shown_per_prompt(people: factories.People) -> None:
    train = {"steps": 1000, "seq_len": 64, "checkpoint": {"every_steps": 100}}
    run = factories.run(people.owner, train=train)
    factories.running(run, factories.node("n1"))
    client = factories.client_for(people.owner)
    assert f'hx-get="/runs/{run.pk}/samples/"' in client.get(f"/runs/{run.pk}/").content.decode()
    assert (
        "The first samples follow after step 100"
        in client.get(f"/runs/{run.pk}/samples/").content.decode()
    )
    for step in range(100, 1001, 100):
        texts = [
            {
                "prompt": "To <be>",
                "text": f" or not {step}",
                "prompt_ids": [1],
                "token_ids": [2, 3],
                "ended": True,
            }
        ]
        data = {"step": step, "samples": texts, "temperature": 0.8, "cut_short": False}
        runs.event_record(
            run=run, type="samples_written", data=data, attempt=1, rank=0, origin=f"1/0/{step}"
        )
    page, queries = queries_of(client, f"/runs/{run.pk}/samples/")
    text = page.content.decode()
    assert (
        queries <= MOST_QUERIES
        and "10 checkpoints, newest at step 1,000" in text
        and "To &lt;be&gt;" in text
    )
    shown, rest = text.split("<details")
    # whitespace of the template is outside of the sample's own text
    assert '<span class="verbatim"> or not 1000</span>' in shown
    assert shown.count("<dd>") == 6 and "or not 100<" in shown and rest.count("<dd>") == 4
    assert (
        "samples written" not in client.get(f"/runs/{run.pk}/?tab=history").content.decode().lower()
    )
    assert factories.client_for(people.stranger).get(f"/runs/{run.pk}/samples/").status_code == 404


def test_buttons_request_a_profile_and_a_memory_snapshot(
    people: factories.People, run: Run
) -> None:
    client = factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "Profile now" in page and "Memory snapshot" in page
    answer = client.post(f"/runs/{run.pk}/act/", {"action": "profile"}, follow=True)
    assert b"Profile of the next step requested" in answer.content
    teammate = factories.client_for(people.teammate)
    refused = teammate.post(f"/runs/{run.pk}/act/", {"action": "memory-snapshot"}, follow=True)
    assert b"operators of a shared team can manage it" in refused.content


KERNELS = {
    "fused": True,
    "runtime": "gpu",
    "arch": "sm_90",
    "torch": "2.13.0",
    "triton": "3.6.0",
    "left_out": 0,
    "operations": [
        {
            "op": "attention",
            "call": "cuda, bfloat16, head_dim 128",
            "backend": "cudnn",
            "reason": "first in the order",
        },
        {
            "op": "rms_norm",
            "call": "bfloat16, n 4096, grad",
            "backend": "own",
            "reason": "first in the default order",
        },
    ],
}


def test_the_page_shows_which_kernels_ran_and_why(people: factories.People, run: Run) -> None:
    client = factories.client_for(people.owner)
    assert "kernels-title" not in client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    runs.event_record(
        run=run, type="kernels_chosen", data=KERNELS, attempt=1, rank=0, origin="1/0/1"
    )
    page = client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    for data in (
        "Orrery kernels run 1 of 2 operations on sm_90.",
        "cuDNN",
        "<b>Orrery kernel</b>",
        "triton 3.6.0",
    ):
        assert data in page
    listed = client.get(f"/api/v1/runs/{run.pk}/events").json()["items"]
    assert [each["data"] for each in listed if each["type"] == "kernels_chosen"] == [KERNELS]
    assert (
        "Orrery kernels run 1 of 2 operations on sm_90"
        in client.get(f"/runs/{run.pk}/?tab=history").content.decode()
    )
    plain = {"fused": False, "runtime": "reference", "operations": []}
    runs.event_record(run=run, type="kernels_chosen", data=plain, attempt=2, rank=0, origin="2/0/1")
    page = client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    assert "all operations run in plain PyTorch" in page and "cuDNN" not in page
