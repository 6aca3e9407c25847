"""How a server lives and ends: keys, a full queue, a drain, a preemption, an engine that breaks."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from workers.contracts.specs.api_key_hash import hash_key
from workers.contracts.wire.points import Point, RunEvent
from workers.contracts.wire.serving_reports import ENGINE_SNAPSHOT, RequestStats, EngineSnapshot, Summary

LONG: dict[str, Any] = {"model": "wordy", "prompt": [1, 2, 3], "extra_body": {"ignore_eos": True}}


def test_keys_a_full_queue_and_an_end_that_waits_for_what_is_on_its_way(made, steps):
    # as the control plane keeps it
    serving = made(api_key=hash_key("sk-right"), max_seqs=2, max_waiting=1)
    for key in ("sk-wrong", "SK-right", hash_key("sk-right")):
        with pytest.raises(openai.AuthenticationError):
            serving.client(key).models.list()
    assert serving.http.get("/v1/models").status_code == 401
    assert serving.http.get("/v1/models", headers=serving.house).status_code == 200, (
        "the control plane needs none"
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
    steps.one()
    assert serving.until(lambda: found if (found := serving.state()).running else None).waiting == 1

    serving.ask("stop", grace_s=120)
    serving.event("draining")
    assert serving.http.get("/health").status_code == 503 and serving.state().draining
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(max_tokens=1, **LONG)
    assert refused.value.status_code == 503
    steps.go()
    ends = [list(stream)[-1].choices[0].finish_reason for stream in streams]
    assert ends == ["length"] * 3, "what was on its way has ended as it would have"
    outcome = serving.ended()
    assert outcome.exit_class == "ok" and "3 requests" in outcome.reason

    summary = Summary.model_validate(serving.event("served"))
    assert (summary.requests, summary.new_tokens, summary.finishes) == (3, 600, {"length": 3})
    assert summary.ttft_s["p50"] <= summary.ttft_s["p99"] and summary.tpot_s["p90"] > 0
    stood = EngineSnapshot.model_validate_json((serving.folder / "rank-0" / ENGINE_SNAPSHOT).read_text())
    assert stood.state.running == 2 and stood.state.map.count("1") == stood.state.used > 0, (
        "as it was asked to end"
    )
    assert (
        summary.snapshot is not None
        and summary.snapshot.state.map == stood.state.map
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
    ours = ("serving", "draining", "served")
    assert tuple(each for each in events if each in ours) == ours
    points = [Point.model_validate(each) for each in serving.lines("points")]
    last = points[-1].values
    assert last["inference/new_tokens"] == 600 and last["memory/kv_cache_bytes"] > 0
    assert {
        "inference/ttft_s",
        "inference/tpot_s",
        "inference/tokens_per_s",
        "inference/prefill_share",
    } <= last.keys()


def test_a_preempted_server_cuts_short_what_outlasts_the_grace(made, steps):
    serving = made()
    steps.hold()
    stream = serving.client().completions.create(stream=True, max_tokens=250, **LONG)
    steps.one()
    next(iter(stream))
    serving.ask("preempt", grace_s=0)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(stream)
    assert serving.ended().exit_class == "preempted"


def test_a_broken_engine_ends_the_run_and_is_told_to_everybody(made, monkeypatch):
    serving = made()
    gate = threading.Event()

    def breaks(*given: Any) -> Any:
        gate.wait(90)
        raise ArithmeticError("the logits are not finite numbers")

    monkeypatch.setattr("workers.inference.runner.Runner.run", breaks)
    stream = serving.client().completions.create(stream=True, max_tokens=9, **LONG)
    gate.set()
    with pytest.raises(openai.APIError, match="not finite numbers"):
        list(stream)
    assert isinstance(serving.ended(), ArithmeticError)
    assert json.loads(json.dumps(serving.event("served")))["finishes"] == {}
