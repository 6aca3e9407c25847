"""The life of a server: keys, a full queue, draining, preemption, a failing engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from workers.contracts.specs.api_key_hash import hash_key
from workers.contracts.wire.points import Point, RunEvent
from workers.contracts.wire.serving_reports import (
    ENGINE_SNAPSHOT,
    EngineSnapshot,
    RequestStats,
    Summary,
)

LONG: dict[str, Any] = {"model": "wordy", "prompt": [1, 2, 3], "extra_body": {"ignore_eos": True}}


def test_keys_full_queue_and_draining(start_server, steps):
    # hashed, as the control plane stores it
    serving = start_server(api_key=hash_key("sk-right"), max_seqs=2, max_waiting=1)
    for key in ("sk-wrong", "SK-right", hash_key("sk-right")):
        with pytest.raises(openai.AuthenticationError):
            serving.client(key).models.list()
    assert serving.http.get("/v1/models").status_code == 401
    assert serving.http.get("/v1/models", headers=serving.control_headers).status_code == 200, (
        "the control plane needs no API key"
    )
    assert (
        serving.http.get(
            "/internal/state", headers={"authorization": "Bearer sk-right"}
        ).status_code
        == 401
    )

    client = serving.client("sk-right")
    steps.hold()
    streams = [client.completions.create(stream=True, max_tokens=200, **LONG) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(max_tokens=1, **LONG)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    steps.allow_one()
    assert serving.until(lambda: state if (state := serving.state()).running else None).waiting == 1

    serving.request_action("stop", grace_s=120)
    serving.event("draining")
    assert serving.http.get("/health").status_code == 503 and serving.state().draining
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(max_tokens=1, **LONG)
    assert refused.value.status_code == 503
    steps.resume()
    ends = [list(stream)[-1].choices[0].finish_reason for stream in streams]
    assert ends == ["length"] * 3, "requests in progress finish normally"
    outcome = serving.wait()
    assert outcome.exit_class == "ok" and "3 requests" in outcome.reason

    summary = Summary.model_validate(serving.event("served"))
    assert (summary.requests, summary.new_tokens, summary.finishes) == (3, 600, {"length": 3})
    assert summary.ttft_s["p50"] <= summary.ttft_s["p99"] and summary.tpot_s["p90"] > 0
    snapshot = EngineSnapshot.model_validate_json(
        (serving.folder / "rank-0" / ENGINE_SNAPSHOT).read_text()
    )
    assert (
        snapshot.state.running == 2 and snapshot.state.map.count("1") == snapshot.state.used > 0
    ), "when it was asked to end"
    assert (
        summary.snapshot is not None
        and summary.snapshot.state.map == snapshot.state.map
        and not summary.snapshot.state.requests
    )
    assert [each.name for each in summary.files] == [ENGINE_SNAPSHOT, "requests.jsonl"]
    lines = [RequestStats.model_validate(each) for each in serving.lines("requests")]
    for each in lines:
        assert (
            each.added_s <= each.admitted_s <= each.first_token_s <= each.ended_s
            and each.blocks == 0
        )
    events = [RunEvent.model_validate(each).type for each in serving.lines("events")]
    expected = ("serving", "draining", "served")
    assert tuple(each for each in events if each in expected) == expected
    points = [Point.model_validate(each) for each in serving.lines("points")]
    last = points[-1].values
    assert last["inference/new_tokens"] == 600 and last["memory/kv_cache_bytes"] > 0
    assert {
        "inference/ttft_s",
        "inference/tpot_s",
        "inference/tokens_per_s",
        "inference/prefill_share",
        "inference/host_s",
    } <= last.keys()


def test_preempted_server_aborts_requests_after_the_grace_period(start_server, steps):
    serving = start_server()
    steps.hold()
    stream = serving.client().completions.create(stream=True, max_tokens=250, **LONG)
    steps.allow_one()
    next(iter(stream))
    serving.request_action("preempt", grace_s=0)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(stream)
    assert serving.wait().exit_class == "preempted"


def test_failing_engine_ends_the_run_and_reaches_all_clients(start_server, monkeypatch):
    serving = start_server()
    release = threading.Event()

    def fail(*args: Any) -> Any:
        release.wait(90)
        raise ArithmeticError("the logits are not finite numbers")

    monkeypatch.setattr("workers.inference.runner.Runner.run", fail)
    stream = serving.client().completions.create(stream=True, max_tokens=9, **LONG)
    release.set()
    with pytest.raises(openai.APIError, match="not finite numbers"):
        list(stream)
    assert isinstance(serving.wait(), ArithmeticError)
    assert json.loads(json.dumps(serving.event("served")))["finishes"] == {}
