"""Side-by-side chats: blind turns, votes, win rates, preference pairs, and servers that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.reviews import comparisons, votes
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from tests import factories
from tests.orchestrator.api.fake_server import Thread
from workers.contracts.examples.formats import parse_line
from workers.contracts.wire.serving_reports import (
    KEY_HEADER,
    SERVING,
    STATE_PATH,
    serve_key,
)

pytestmark = pytest.mark.django_db(transaction=True)
JSON = "application/json"


class Server:
    """Answers with its name and the number of messages; `status` other than 200 fails."""

    def __init__(self, name: str) -> None:
        self.name, self.status = name, 200
        self.body: bytes | None = None  # sent instead; empty: blanks without end
        self.calls: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route(STATE_PATH, self.state),
            ]
        )

    async def state(self, request: Request) -> Response:
        blocks = {"blocks": 1, "block_size": 1, "used": 0, "map": "."}
        adapters = [{"name": "support", "path": "/a", "rank": 4}]
        state = {"now_s": 1, "running": 0, "waiting": 0, **blocks, "adapters": adapters}
        return JSONResponse(state)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(body)
        self.keys.append(request.headers.get(KEY_HEADER))
        if self.body == b"":
            return StreamingResponse(self.blanks())
        if self.body is not None:
            return Response(self.body, self.status)
        message = {"content": f"{body['model']} says {len(body['messages'])}"}
        return JSONResponse({"choices": [{"message": message}]}, status_code=self.status)

    async def blanks(self) -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)


@pytest.fixture
def served(people: factories.People) -> Iterator[list[tuple[Run, Server]]]:
    node = factories.node("n1")
    pairs = []
    servers = [Server("left"), Server("right")]
    with Thread(servers[0].app) as one, Thread(servers[1].app) as two:
        for server, thread in zip(servers, (one, two), strict=True):
            run = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
            attempt = factories.running(run, node)
            data = {"host": "", "port": thread.port, "model": server.name, "context": 99}
            runs.event_record(run=run, type=SERVING, data={**data, "chat": True}, attempt=1)
            server.keys.append(serve_key(str(attempt.fence)))
            pairs.append((run, server))
        yield pairs


def test_votes_are_blind_counted_and_written_as_pairs(
    people: factories.People, served: list[tuple[Run, Server]], data_root: Path
) -> None:
    client = factories.api(people.owner)
    body = {"runs": [run.pk for run, _ in served], "system": "Be brief.", "max_tokens": 9}
    made = client.post("/api/v1/model-comparisons", body, content_type=JSON).json()
    assert made["models"] == ["left", "right"]
    address = f"/api/v1/model-comparisons/{made['id']}"
    orders = set()
    for _ in range(40):
        turn = client.post(f"{address}/turns", {"text": "Hi"}, content_type=JSON).json()
        assert turn["models"] is None and "left" not in json.dumps(turn["messages"])
        orders.add(turn["a"])
        choice = "a" if turn["a"].startswith("left") else "b"
        vote = f"{address}/turns/{turn['id']}/vote"
        voted = client.post(vote, {"choice": choice}, content_type=JSON).json()
        winner = voted["models"][0 if choice == "a" else 1]
        assert winner == f"left (run {served[0][0].pk})"
        assert client.post(vote, {"choice": "a"}, content_type=JSON).status_code == 409
        if len(orders) == 2 and turn["id"] > 3:
            break
    assert len(orders) == 2, "the order is drawn by chance"
    for server in (server for _, server in served):
        assert server.keys[0] == server.keys[1], "the key of the run's own server"
        assert server.calls[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert server.calls[0]["max_tokens"] == 9

    # a conversation continues after the better answer, once there is a vote
    more = {"text": "More", "conversation": turn["conversation"]}
    second = client.post(f"{address}/turns", more, content_type=JSON).json()
    assert [each["content"] for each in second["messages"]] == [
        "Be brief.",
        "Hi",
        "left says 2",
        "More",
    ]
    refused = client.post(f"{address}/turns", more, content_type=JSON)
    assert refused.status_code == 409 and "Vote on the last answers" in refused.json()["detail"]
    vote = f"{address}/turns/{second['id']}/vote"
    mate = factories.api(people.teammate)
    assert mate.post(vote, {"choice": "a"}, content_type=JSON).status_code == 409
    assert client.post(vote, {"choice": "tie"}, content_type=JSON).status_code == 200

    [pair] = mate.get("/api/v1/model-comparisons/votes").json()["items"]
    wins = len(served[0][1].calls) - 1
    assert (pair["wins"], pair["losses"], pair["ties"]) == (wins, 0, 1)
    assert pair["win_rate"] == pytest.approx((wins + 0.5) / (wins + 1))
    assert pair["low"] < pair["win_rate"] < pair["high"] <= 1
    written = client.post(f"{address}/data-sets", {}, content_type=JSON).json()
    lines = [json.loads(text) for text in Path(written["path"]).read_text().splitlines()]
    assert len(lines) == wins and written["format"] == "preference"
    assert lines[0]["chosen"][0]["content"].startswith("left")
    assert lines[0]["vote"]["by"] == "owner"
    assert parse_line(json.dumps(lines[0]), "preference").shape == "pairs"


def test_an_adapter_is_compared_with_its_base_and_named_in_the_pairs(
    people: factories.People, served: list[tuple[Run, Server]], data_root: Path
) -> None:
    run = served[0][0]
    run.spec["serve"]["adapter_slots"] = 1
    run.save(update_fields=["spec"])
    page = factories.client_for(people.owner)
    shown = page.get("/data/comparisons/").content.decode()
    assert f'<option value="{run.pk}:support">' in shown and "adapter support" in shown
    assert f'<option value="{run.pk}" selected>' in shown, "the other run's model is on the left"
    missing = page.post("/data/comparisons/", {"left": f"{run.pk}", "right": f"{run.pk}:other"})
    assert missing.status_code == 422 and "serves no model other" in missing.content.decode()
    assert "one of left, support" in missing.content.decode()
    begun = page.post("/data/comparisons/", {"left": f"{run.pk}", "right": f"{run.pk}:support"})
    address = f"/api/v1/model-comparisons/{begun['Location'].strip('/').split('/')[-1]}"
    client = factories.api(people.owner)
    assert client.get(address).json()["models"] == ["left", "support"]
    turn = client.post(f"{address}/turns", {"text": "Hi"}, content_type=JSON).json()
    choice = "a" if turn["a"].startswith("support") else "b"
    client.post(f"{address}/turns/{turn['id']}/vote", {"choice": choice}, content_type=JSON)
    written = client.post(f"{address}/data-sets", {}, content_type=JSON).json()
    [line] = [json.loads(text) for text in Path(written["path"]).read_text().splitlines()]
    assert line["vote"]["chosen_model"] == f"support (run {run.pk})"
    assert line["vote"]["rejected_model"] == f"left (run {run.pk})"
    assert {call["model"] for call in served[0][1].calls} == {"left", "support"}


def test_what_cannot_be_compared_is_refused(
    people: factories.People, served: list[tuple[Run, Server]]
) -> None:
    client, (one, two) = factories.api(people.owner), served
    waiting = factories.run(people.owner, kind="serve", train=None, plan={}, serve={})
    train = factories.run(people.owner)
    for ids, status, message in (
        ([one[0].pk, one[0].pk], 422, "both sides are the same model"),
        ([one[0].pk, waiting.pk], 409, "is queued"),
        ([one[0].pk, train.pk], 422, "is a train run"),
        ([one[0].pk, 999], 404, "There is no run 999"),
        ([one[0].pk], 422, "runs"),
    ):
        answer = client.post("/api/v1/model-comparisons", {"runs": ids}, content_type=JSON)
        assert answer.status_code == status and message in answer.json()["detail"]
    row = comparisons.comparison_create(by=people.owner, run_ids=[one[0].pk, two[0].pk])
    address = f"/api/v1/model-comparisons/{row.pk}/turns"
    two[1].status = 500
    failed = client.post(address, {"text": "Hi"}, content_type=JSON)
    assert failed.status_code == 503 and "One of the servers" in failed.json()["detail"]
    assert client.post(address, {"text": " "}, content_type=JSON).status_code == 422
    assert votes.table(user=people.owner) == [] and not row.turns.exists()


def test_a_server_is_not_trusted(
    people: factories.People,
    served: list[tuple[Run, Server]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, (one, two) = factories.api(people.owner), served
    row = comparisons.comparison_create(by=people.owner, run_ids=[one[0].pk, two[0].pk])
    address = f"/api/v1/model-comparisons/{row.pk}/turns"

    def request() -> Any:
        return client.post(address, {"text": "Hi"}, content_type=JSON)

    for status, body, message in (
        (400, b'{"error": "right has no such option"}', "status is 400"),
        (
            400,
            b'{"error": {"code": "context_length_exceeded", "message": "right has 32 tokens"}}',
            "exceeds the model's context. Start a comparison with fewer max tokens",
        ),
        (200, b"right" * 300_000, "larger than 1 MiB"),
        (200, b"[" * 100_000, "is not a chat completion"),
    ):
        two[1].status, two[1].body = status, body
        failed = request()
        assert failed.status_code == 503 and message in failed.json()["detail"]
        assert "right" not in failed.json()["detail"]
    two[1].status, two[1].body = 200, b'{"choices": [{"message": {"content": "a\\u0000b\\ud800"}}]}'
    turn = request().json()
    assert "a\ufffdb\ufffd" in (turn["a"], turn["b"])
    two[1].body = b""
    monkeypatch.setattr(comparisons, "ANSWER_S", 0.5)
    late = request()
    assert late.status_code == 503 and "took longer" in late.json()["detail"]
    monkeypatch.setattr(comparisons, "_running", threading.BoundedSemaphore(1))
    with comparisons._running:
        busy = request()
    assert busy.status_code == 429 and busy.headers["Retry-After"] == "5"


def test_the_interval_is_wilsons() -> None:
    # Brown, Cai and DasGupta 2001: Wilson's interval of 8 in 10
    assert votes.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert votes.wilson(0, 5)[0] == pytest.approx(0.0) and votes.wilson(5, 5)[1] <= 1.0
