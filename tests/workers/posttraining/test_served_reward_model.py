"""Rewards of a served reward model: scores by token ids, another tokenizer, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from workers.contracts.specs.finetuning.chat_servers import SERVERS_VARIABLE
from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PpoBody
from workers.posttraining.produce import client
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore
from workers.runtime.exit_codes import UserError

SPEC = {"kind": "model", "run": 12}
CONTEXT = 32  # of the smallest examples


class Server:
    """A reward model whose score is the mean of the token ids; texts are read as bytes."""

    def __init__(self) -> None:
        self.down = False
        self.requests: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append((self.path, self.headers["x-orrery-key"], body))
                given = body["input"]
                ids = list(given.encode()) if isinstance(given, str) else given[0]
                if outer.down:
                    self._send(503, {"error": "not ready"})
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


def test_a_server_that_is_down_fails_and_may_come_back(server: Server) -> None:
    reward = built()
    try:
        reward.client._wait = lambda seconds: None
        server.down = True
        [score] = reward.score([answer(1)])
        assert score.failure.startswith("the reward model: ") and "status 503" in score.failure
        server.down = False
        assert reward.score([answer(1)])[0].value == 1.0
    finally:
        reward.close()


def test_another_tokenizer_is_refused(server: Server) -> None:
    with pytest.raises(UserError, match=r"run 12 has another tokenizer than the policy"):
        built(lambda text: [byte + 1 for byte in text.encode()])


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
