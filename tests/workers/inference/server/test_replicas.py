"""Servers behind one endpoint: replicas with prefix caches of their own, and vLLM's server."""

from __future__ import annotations

import json
import os
import textwrap
import threading
import time
from typing import Any

import openai
import pytest

from tests.workers.inference.server.conftest import open_request
from workers.contracts.wire.serving_reports import RequestStats, Summary
from workers.inference.server.http.errors import ApiError
from workers.inference.server.observe.finished_requests import FinishedRequests
from workers.inference.server.replicas.router import Replica, ReplicaRouter
from workers.inference.server.replicas.stats import ReplicaStatsCollector
from workers.runtime.environment import Environment

VLLM = """
    import json, os, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    counts = {"tokens": 0, "requests": 0}
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/metrics":
                rows = ["vllm:num_requests_running{model_name=\\"m\\"} 0.0",
                        "vllm:kv_cache_usage_perc 0.25",
                        "vllm:cache_config_info{block_size=\\"16\\",num_gpu_blocks=\\"400\\"} 1.0",
                        f"vllm:generation_tokens_total {counts['tokens']}",
                        "vllm:prompt_tokens_total 10",
                        f"vllm:time_to_first_token_seconds_sum {counts['requests'] / 4}",
                        f"vllm:time_to_first_token_seconds_count {counts['requests']}"]
                return self.reply("\\n".join(rows))
            self.reply(json.dumps({"object": "list", "data": [
                {"id": options["--served-model-name"], "object": "model", "max_model_len": 77}]}))
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if body["prompt"] == "end":
                os._exit(3)
            counts["requests"] += 1
            counts["tokens"] += 3
            choice = {"index": 0, "text": "said", "finish_reason": "stop", "logprobs": None}
            chunk = {"id": "x", "object": "text_completion", "created": 1, "model": "m",
                     "choices": [choice]}
            events = "data: " + json.dumps(chunk) + "\\n\\ndata: [DONE]\\n\\n"
            self.reply(events, "text/event-stream")
        def reply(self, text, kind="application/json"):
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        def log_message(self, *args):
            pass
    ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def test_requests_go_to_the_replica_that_cached_their_prefix(start_server, steps, monkeypatch):
    addresses: dict[int, tuple[str, int]] = {}
    both = threading.Barrier(2, timeout=90)

    def exchange(address: tuple[str, int], environment: Environment) -> list[tuple[str, int]]:
        addresses[environment.rank] = address
        both.wait()
        return [addresses[0], addresses[1]]

    monkeypatch.setattr("workers.inference.server.server.exchange_addresses", exchange)
    serving = start_server(ranks=2, max_seqs=4)
    client = serving.client()
    long: dict[str, Any] = {"model": "wordy", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    one, two = [[first, *range(2, 50)] for first in (9, 10)]
    steps.hold()  # the second arrives while the first is in progress
    streams = [
        client.completions.create(prompt=prompt, stream=True, **long) for prompt in (one, two)
    ]
    steps.resume()
    for stream in streams:
        assert len(list(stream)) > 1
    cached = [
        client.completions.create(
            prompt=[*prompt, 7], **long
        ).usage.prompt_tokens_details.cached_tokens
        for prompt in (two, one, two)
    ]
    assert cached == [48, 48, 48], "each on the replica that computed its prefix"
    assert {len(serving.lines("requests", rank)) for rank in (0, 1)} == {2, 3}
    steps.hold()
    # clients disconnect before any response, on either replica
    for prompt in (one, two):
        with open_request(serving, {"prompt": prompt, "max_tokens": 200, "ignore_eos": True}):
            serving.until(lambda: steps.allow_one() or serving.state().running or None)
        state = serving.idle_state()
    steps.resume()
    assert state.used == 0 and len(state.map) == state.blocks and len(state.requests) == 7
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[999], **long)
    serving.request_action()
    outcome = serving.wait()
    assert outcome.exit_class == "ok" and "after 7 requests" in outcome.reason
    summary = Summary.model_validate(serving.event("served"))
    assert summary.finishes == {"length": 5, "aborted": 2} and summary.silent == 0, (
        "of all replicas"
    )
    assert 300 < summary.new_tokens < 700 and summary.ttft_s is not None and len(summary.last) == 7


def test_lines_of_a_killed_replica_count(tmp_path):
    for rank in (2, 4):
        (tmp_path / f"rank-{rank}").mkdir()
    path = tmp_path / "rank-2" / "requests.jsonl"
    line = {
        "id": "x",
        "state": "ended",
        "added_s": 1,
        "first_token_s": 2,
        "ended_s": 4,
        "finish": "length",
        "prompt_tokens": 3,
        "new_tokens": 5,
        "max_new_tokens": 5,
    }
    path.write_text(json.dumps({**line, "id": "earlier attempt"}) + "\n")
    collector, finished = ReplicaStatsCollector(tmp_path, [2, 4, 6]), FinishedRequests()
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n" + '{"id": "y", "sta')
    theirs = FinishedRequests()
    theirs.add(RequestStats.model_validate(line))
    collector.receive(theirs.replica_stats(rank=4, seconds=9.0))
    with pytest.raises(ValueError, match="rank 5 is not the first rank"):
        collector.receive(theirs.replica_stats(rank=5, seconds=9.0))
    assert collector.add_to(finished, since_s=time.perf_counter() - 20) == 1, "rank 6"
    summary = finished.summary(seconds=1)
    assert (summary.requests, summary.new_tokens, summary.ttft_s) == (
        2,
        10,
        {"p50": 1.0, "p90": 1.0, "p99": 1.0},
    )
    assert [round(each.ended_s or 0) for each in summary.last] == [4, 15], (
        "by the clock of the first replica"
    )


def test_busy_replica_is_passed_over_and_full_ones_refuse():
    first, second = Replica(0, None), Replica(1, None)
    router = ReplicaRouter([first, second], block_size=4, capacity=4, slack=2)
    prompt = list(range(8))
    chosen = [router.route(prompt, 1) for _ in range(5)]
    assert chosen[:3] == [first] * 3 and second in chosen[3:], (
        "a queue costs more than a prefix saves"
    )
    with pytest.raises(ApiError) as refused:
        for _ in range(9):
            router.route(prompt, 1)
    assert refused.value.status == 429 and (first.in_progress, second.in_progress) == (4, 4)


def test_sequential_requests_fill_all_caches():
    router = ReplicaRouter([Replica(0, None), Replica(1, None)], block_size=4, capacity=4, slack=2)
    ranks = []
    for first in (1, 2, 3, 2, 2, 4):
        chosen = router.route([first] * 8, 1)
        chosen.in_progress -= 1  # finished
        ranks.append(chosen.rank)
    assert ranks == [0, 1, 0, 1, 1, 0], "cached prefixes stay on their replica"


def test_vllm_backend_is_started_watched_and_stopped(start_server, tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="vllm is not installed on this node"):
        start_server(backend="vllm")
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(textwrap.dedent(VLLM))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    )
    serving = start_server(backend="vllm", api_key="sk-1", max_seqs=3)
    event = serving.event("serving")
    assert (event["backend"], event["model"], event["context"], event["blocks"]) == (
        "vllm",
        "wordy",
        77,
        400,
    )
    with pytest.raises(openai.AuthenticationError):
        serving.client("sk-2").models.list()
    client = serving.client("sk-1")
    assert [each.id for each in client.models.list()] == ["wordy"]
    chunks = list(client.completions.create(model="wordy", prompt="x", stream=True))
    assert [each.choices[0].text for each in chunks] == ["said"]

    def first_output():  # earlier points may have no output yet
        values = [each["values"] for each in serving.lines("points")]
        reported = (each for each in values if each["inference/new_tokens"])
        return next((each for each in reported if "inference/ttft_s" in each), None)

    values = serving.until(first_output)
    assert values["inference/new_tokens"] == 3 and values["inference/kv_blocks_used"] == 100
    assert values["inference/ttft_s"] == 0.25
    with pytest.raises(openai.APIError):
        client.completions.create(model="wordy", prompt="end")
    outcome = serving.wait()
    assert isinstance(outcome, ChildProcessError) and "code 3" in str(outcome)
