"""Rewards of a served reward model: scores by token ids, another tokenizer, refusals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.workers.posttraining.policy_ranks import run_policy
from tests.workers.posttraining.separate_ranks import run_separate
from tests.workers.posttraining.test_rewards import policy_spec
from workers.contracts.specs.finetuning.chat_servers import SERVERS_VARIABLE
from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PpoBody
from workers.models.weights.manifest import complete_checkpoints
from workers.posttraining.produce import client
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore
from workers.runtime.exit_codes import RunServerLost, UserError

SPEC = {"kind": "model", "run": 12}
CONTEXT = 32  # of the smallest examples


class Server:
    """A reward model whose score is the mean of the token ids; texts are read as bytes."""

    def __init__(self) -> None:
        self.down, self.slow_s = False, 0.0
        self.left: int | None = None  # requests until it is down
        self.requests: list[Any] = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append((self.path, self.headers["x-orrery-key"], body))
                given = body["input"]
                ids = list(given.encode()) if isinstance(given, str) else given[0]
                with lock:
                    if outer.left is not None:
                        outer.down, outer.left = outer.left == 0, max(0, outer.left - 1)
                if outer.down:
                    self._send(503, {"error": "not ready"})
                elif outer.slow_s:
                    time.sleep(outer.slow_s)
                    self._send(503, {})
                elif unknown := [each for each in ids if each > 255]:  # as Orrery's server
                    refusal = (
                        f"the prompt has the token id {unknown[0]}; the model's ids are 0 to 255"
                    )
                    self._send(400, {"error": refusal})
                elif len(ids) > CONTEXT:
                    self._send(400, {"error": f"input has {len(ids)} tokens"})
                else:
                    self._send(200, {"data": [{"data": [sum(ids) / len(ids)]}], "usage": {}})

            def _send(self, status: int, answer: Any) -> None:
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    served = Server()
    url = f"http://127.0.0.1:{served.http.server_address[1]}/v1"
    known = {"12": {"url": url, "model": "reward", "headers": {"x-orrery-key": "secret"}}}
    monkeypatch.setenv(SERVERS_VARIABLE, json.dumps(known))
    monkeypatch.setattr(client, "TRIES", 2)
    yield served
    served.http.shutdown()
    served.http.server_close()


def answer(*ids: int) -> AnswerToScore:
    return AnswerToScore("p", "a", None, "line 1", ids)


def built(encode: Any = None, **spec: Any) -> Any:
    options = GrpoBody.from_dict({"rewards": [{**SPEC, **spec}]})
    return build_rewards(options, encode=encode)[0]


def test_scores_are_of_the_ids_that_were_sampled(server: Server) -> None:
    reward = built(lambda text: list(text.encode()))
    try:
        scores = reward.score([answer(1, 2, 3), answer(250)])
        assert [each.value for each in scores] == [2.0, 250.0]
        path, key, body = server.requests[-1]
        assert (path, key) == ("/pooling", "secret")
        assert body["model"] == "reward" and body["use_activation"] is False
    finally:
        reward.close()


def test_an_answer_that_the_server_refuses_fails_alone(server: Server) -> None:
    reward = built()
    try:
        first, second = reward.score([answer(*range(CONTEXT + 1)), answer(4)])
        assert f"input has {CONTEXT + 1} tokens" in first.failure and (
            second.value,
            second.failure,
        ) == (4, "")
    finally:
        reward.close()


def test_a_run_that_does_not_answer_ends_the_attempt(server: Server) -> None:
    """Its next attempt may have another address, which this attempt cannot know."""
    reward = built()
    try:
        reward.client._wait = lambda seconds: None
        server.down = True
        with pytest.raises(client.ServerLost, match=r"reward model of run 12: .*status 503"):
            reward.score([answer(1)])
        server.down = False
        assert reward.score([answer(1)])[0].value == 1.0
        server.down = True
        with pytest.raises(RunServerLost, match=r"reward model of run 12: .*status 503"):
            reward.score([answer(1), answer(2)])
    finally:
        reward.close()


def test_a_run_that_does_not_answer_the_first_request_is_no_error_of_the_user(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    server.down = True
    with pytest.raises(client.ServerLost, match="status 503"):
        built(lambda text: list(text.encode()))


@pytest.mark.ranks
def test_a_run_without_its_server_is_preempted_and_continues_when_it_serves(
    server: Server, tmp_path: Path
) -> None:
    lines = [{"prompt": "ab"}, {"prompt": "de"}]
    made = policy_spec(tmp_path, lines, rewards=[SPEC])
    made["train"]["steps"] = 4
    server.left = 2 + 4 * 2  # the check of the tokenizer, then 4 answers per step
    [outcome] = run_policy(None, made, tmp_path / "run").outcomes
    assert (outcome["class"], outcome["step"]) == ("preempted", 2), outcome
    assert "the server was lost: " in outcome["reason"] and "run 12" in outcome["reason"]
    folder = tmp_path / "run" / "checkpoints"
    assert [each.name for each in complete_checkpoints(folder)] == ["step-00000002"]
    events = (tmp_path / "run" / "rank-0" / "events.jsonl").read_text()
    assert '"server_lost"' in events
    server.down, server.left = False, None
    again = run_policy(None, made, tmp_path / "run")
    assert (again.outcomes[0]["class"], again.outcomes[0]["step"]) == ("ok", 4)


@pytest.mark.ranks
def test_rollout_ranks_without_a_server_end_the_attempt_as_preempted(
    server: Server, tmp_path: Path
) -> None:
    rollout = {"max_new_tokens": 4, "sync": "separate", "devices": 2}
    made = policy_spec(tmp_path, [{"prompt": "ab"}], rewards=[SPEC], rollout=rollout)
    server.left = 2 * 2 + 4
    outcomes = run_separate(made, tmp_path / "run")
    assert {(each.exit_class, each.step) for each in outcomes} == {("preempted", 1)}, outcomes


def test_another_tokenizer_is_refused(server: Server) -> None:
    with pytest.raises(UserError, match=r"run 12 has another tokenizer than the policy"):
        built(lambda text: [byte + 1 for byte in text.encode()])
    with pytest.raises(UserError, match=r"run 12 has another tokenizer than the policy"):
        built(lambda text: [byte + 300 for byte in text.encode()])


def test_the_check_of_the_tokenizer_has_a_time_limit(server: Server) -> None:
    """The other ranks wait for it in a collective operation."""
    server.slow_s = 1.0
    options = GrpoBody.from_dict({"rewards": [SPEC]})
    with pytest.raises(client.ServerLost, match=r"did not score a short text within 0\.1 s"):
        build_rewards(options, judge_s=0.1, encode=lambda text: list(text.encode()))


def test_a_run_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVERS_VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"does not know the address of run 12"):
        built()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"kind": "model"}, "either a folder of weights or a serve run"),
        ({"kind": "model", "path": "a", "run": 3}, "either a folder of weights or a serve run"),
        ({"kind": "judge", "prompt": "{answer}"}, "a server is either a run or a url"),
        ({"kind": "judge", "prompt": "x", "run": 3}, "does not show the answer"),
        ({"kind": "judge", "prompt": "{answer}", "run": 3, "key_env": "K"}, "needs no key"),
        ({"kind": "judge", "prompt": "{answer}", "url": "http://h/v1"}, "needs the model's id"),
    ],
)
def test_a_reward_names_one_model(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrpoBody.from_dict({"rewards": [reward]})


def test_the_short_form_of_ppo_names_a_serve_run() -> None:
    body = PpoBody.from_dict({"rewards": [], "reward_model": {"run": 12}})
    assert body.rewards[0].to_dict() == {
        "kind": "model",
        "run": 12,
        "name": "reward_model",
        "weight": 1.0,
    }
