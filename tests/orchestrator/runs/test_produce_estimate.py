"""The estimate of a produce run: requests by method, speed of a serve run, prices."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs import services
from orchestrator.runs.outputs.produce_estimate import estimate_produce
from workers.contracts.specs.finetuning.produce import ProduceBody

SERVER = {"url": "http://127.0.0.1:8000/v1", "model": "tiny"}


def body(**more: Any) -> ProduceBody:
    return ProduceBody.from_dict(
        {"tasks": ["math"], "count": 10, "server": SERVER, "max_new_tokens": 100, **more}
    )


@pytest.mark.parametrize(
    ("fields", "requests", "scoring"),
    [
        ({}, 20, 0),  # an instruction and its answer
        ({"method": "answer", "seeds": "s"}, 10, 0),
        ({"method": "evol", "rounds": 3, "seeds": "s"}, 40, 0),
        ({"method": "best_of_n", "samples": 4, "seeds": "s"}, 40, 40),
        ({"method": "best_of_n", "score": {"kind": "exact"}, "seeds": "s"}, 40, 0),
        ({"filters": [{"kind": "judge", "threshold": 5}]}, 20, 10),
        # half are dialogues of three answers and two follow-up questions
        ({"tasks": ["math", "dialogue"], "turns": 3}, 40, 0),
    ],
)
def test_requests_follow_from_the_method(
    fields: dict[str, Any], requests: int, scoring: int
) -> None:
    result = estimate_produce(body(**fields), None)
    assert (result.requests, result.scoring_requests) == (requests, scoring)
    assert result.output_tokens == requests * 100
    assert result.time_s is None and "a server at a URL is unknown" in result.reason


def test_prices_give_a_cost() -> None:
    result = estimate_produce(body(server={**SERVER, "usd_per_million_completion_tokens": 5}), None)
    assert result.cost_usd == pytest.approx(2000 * 5 / 1e6)


@pytest.mark.django_db
def test_a_serve_run_gives_speed_time_and_cost(owner: User) -> None:
    spec = {"kind": "serve", "model": "llama-15m", "serve": {}}
    server = services.run_submit(owner=owner, name="serve", spec=spec)
    assert server.prediction is not None
    produce = body(server={"run": server.pk}, concurrency=4)
    result = estimate_produce(produce, server)
    points = {point["batch"]: point["tokens_per_s"] for point in server.prediction["curve"]}
    assert result.tokens_per_s == points[max(batch for batch in points if batch <= 4)]
    assert result.tokens_per_s is not None and result.time_s is not None
    assert result.time_s == pytest.approx(2000 / result.tokens_per_s)
    assert result.cost_usd is not None and result.cost_usd > 0
    produced = produce.model_dump(mode="json", exclude_unset=True)
    preview = services.spec_preview({"kind": "produce", "produce": produced}, by=owner)
    assert preview["produce"]["time_s"] == pytest.approx(result.time_s)
    server.prediction = None
    assert "has no prediction of its speed" in estimate_produce(produce, server).reason
