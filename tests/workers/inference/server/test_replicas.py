"""What stands behind one endpoint: replicas with prefixes of their own, and another program's
server.
"""

from __future__ import annotations

import json
import os
import textwrap
import threading
import time
from typing import Any

import openai
import pytest

from tests.workers.inference.server.conftest import asked
from workers.contracts.wire.serving_reports import RequestStats, Summary
from workers.inference.server.http.errors import ApiError
from workers.inference.server.observe.finished_requests import Ended
from workers.inference.server.replicas.router import Fleet, Replica
from workers.inference.server.replicas.stats import Others
from workers.runtime.environment import Environment

VLLM = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    counts = {"tokens": 0}
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/metrics":
                rows = ["vllm:num_requests_running{model_name=\\"m\\"} 0.0", "vllm:kv_cache_usage_perc 0.25",
                        "vllm:cache_config_info{block_size=\\"16\\",num_gpu_blocks=\\"400\\"} 1.0",
                        f"vllm:generation_tokens_total {counts['tokens']}", "vllm:prompt_tokens_total 10",
                        "vllm:time_to_first_token_seconds_sum 0.5", "vllm:time_to_first_token_seconds_count 2"]
                return self.tell("\\n".join(rows))
            self.tell(json.dumps({"object": "list", "data": [
                {"id": given["--served-model-name"], "object": "model", "max_model_len": 77}]}))
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if body["prompt"] == "end":
                import os
                os._exit(3)
            counts["tokens"] += 3
            chunk = {"id": "x", "object": "text_completion", "created": 1, "model": "m",
                     "choices": [{"index": 0, "text": "said", "finish_reason": "stop", "logprobs": None}]}
            self.tell("data: " + json.dumps(chunk) + "\\n\\ndata: [DONE]\\n\\n", "text/event-stream")
        def tell(self, text, kind="application/json"):
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        def log_message(self, *given):
            pass
    ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


def test_requests_go_where_their_beginning_is_known_and_the_answers_come_back(
    made, steps, monkeypatch
):
    addresses: dict[int, tuple[str, int]] = {}
    both = threading.Barrier(2, timeout=90)

    def meet(at: tuple[str, int], around: Environment) -> list[tuple[str, int]]:
        addresses[around.rank] = at
        both.wait()
        return [addresses[0], addresses[1]]

    monkeypatch.setattr("workers.inference.serve.meet", meet)
    serving = made(ranks=2, max_seqs=4)
    client = serving.client()
    long: dict[str, Any] = {"model": "wordy", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    one, two = [[first, *range(2, 50)] for first in (9, 10)]
    steps.hold()  # the second one comes while the first is on its way
    streams = [
        client.completions.create(prompt=prompt, stream=True, **long) for prompt in (one, two)
    ]
    steps.go()
    for stream in streams:
        assert len(list(stream)) > 1
    cached = [
        client.completions.create(
            prompt=[*prompt, 7], **long
        ).usage.prompt_tokens_details.cached_tokens
        for prompt in (two, one, two)
    ]
    assert cached == [48, 48, 48], "each on the replica that had computed it"
    assert {len(serving.lines("requests", rank)) for rank in (0, 1)} == {2, 3}
    steps.hold()
    # whoever asks is gone before anything has come back, from either replica
    for prompt in (one, two):
        with asked(serving, {"prompt": prompt, "max_tokens": 200, "ignore_eos": True}):
            serving.until(lambda: steps.one() or serving.state().running or None)
        state = serving.settled()
    steps.go()
    assert state.used == 0 and len(state.map) == state.blocks and len(state.requests) == 7
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[999], **long)
    serving.ask()
    outcome = serving.ended()
    assert outcome.exit_class == "ok" and "after 7 requests" in outcome.reason
    summary = Summary.model_validate(serving.event("served"))
    assert summary.finishes == {"length": 5, "aborted": 2} and summary.silent == 0, (
        "of all replicas, on any node"
    )
    assert 300 < summary.new_tokens < 700 and summary.ttft_s is not None and len(summary.last) == 7


def test_of_a_replica_that_was_killed_the_lines_on_this_node_count(tmp_path):
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
    path.write_text(json.dumps({**line, "id": "of an earlier attempt"}) + "\n")
    others, ended = Others(tmp_path, [2, 4, 6]), Ended()
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n" + '{"id": "y", "sta')
    theirs = Ended()
    theirs.add(RequestStats.model_validate(line))
    others.hear(theirs.tally(rank=4, seconds=9.0))
    with pytest.raises(ValueError, match="rank 5 leads no other replica"):
        others.hear(theirs.tally(rank=5, seconds=9.0))
    assert others.add_to(ended, since_s=time.perf_counter() - 20) == 1, "of rank 6 nothing is known"
    summary = ended.summary(seconds=1)
    assert (summary.requests, summary.new_tokens, summary.ttft_s) == (
        2,
        10,
        {"p50": 1.0, "p90": 1.0, "p99": 1.0},
    )
    assert [round(each.ended_s or 0) for each in summary.last] == [4, 15], (
        "by the clock of the first"
    )


def test_a_busy_replica_is_passed_over_and_full_ones_refuse():
    first, second = Replica(0, None), Replica(1, None)
    fleet = Fleet([first, second], block_size=4, capacity=4, slack=2)
    prompt = list(range(8))
    chosen = [fleet.choose(prompt, 1) for _ in range(5)]
    assert chosen[:3] == [first] * 3 and second in chosen[3:], (
        "a queue costs more than a prefix saves"
    )
    with pytest.raises(ApiError) as refused:
        for _ in range(9):
            fleet.choose(prompt, 1)
    assert refused.value.status == 429 and (first.inside, second.inside) == (4, 4)


def test_one_request_after_another_fills_the_caches_of_all():
    fleet = Fleet([Replica(0, None), Replica(1, None)], block_size=4, capacity=4, slack=2)
    ranks = []
    for first in (1, 2, 3, 2, 2, 4):
        chosen = fleet.choose([first] * 8, 1)
        chosen.inside -= 1  # answered
        ranks.append(chosen.rank)
    assert ranks == [0, 1, 0, 1, 1, 0], "what is known stays where it is"


def test_vllm_is_started_watched_and_ended_in_our_place(made, tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="vllm is not installed on this node"):
        made(backend="vllm")
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(textwrap.dedent(VLLM))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    )
    serving = made(backend="vllm", api_key="sk-1", max_seqs=3)
    told = serving.event("serving")
    assert (told["backend"], told["model"], told["context"], told["blocks"]) == (
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

    def answered():  # a point before it may tell that nothing is written yet
        told_of = [each["values"] for each in serving.lines("points")]
        return next((each for each in told_of if each["inference/new_tokens"]), None)

    values = serving.until(answered)
    assert values["inference/new_tokens"] == 3 and values["inference/kv_blocks_used"] == 100
    assert values["inference/ttft_s"] == 0.25
    with pytest.raises(openai.APIError):
        client.completions.create(model="wordy", prompt="end")
    ended = serving.ended()
    assert isinstance(ended, ChildProcessError) and "code 3" in str(ended)
