"""Bad input to the server: OpenAI's error and status, no leak, and the server continues."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.workers.inference.server.conftest import TEMPLATE, Serving
from tests.workers.inference.untrained import untrained_folder
from workers.inference.main import main

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2},
}
FIELDS = [
    "model",
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "logit_bias",
    "response_format",
    "prompt",
    "echo",
    "best_of",
    "suffix",
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "regex",
    "grammar",
    "priority",
    "no_such_field",
]
VALUES = [
    -1,
    1.5,
    1e999,
    -1e999,
    10**4000,
    True,
    [],
    [1],
    {"a": 1},
    5e-324,
    2**63,
    "\ud800",
    "y" * 3000,
]


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model with a byte-level tokenizer and a chat template."""
    weights = Path(tmp_path_factory.mktemp("secret")) / "bytewise"
    weights.mkdir()
    untrained_folder(weights)
    words = tokenizers.ByteLevelBPETokenizer()
    words.train_from_iterator(["ab"], vocab_size=256)
    words.save(str(weights / "tokenizer.json"))
    (weights / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "!"})
    )
    created = Serving(
        tmp_path_factory.mktemp("run"), weights, max_seqs=4, max_waiting=8, kv_blocks=24
    )
    yield created
    created.request_action()
    assert created.wait().exit_class == "ok"  # type: ignore[union-attr]


def send(
    serving: Serving, path: str, content: str | bytes | dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Status and error (none for 200)."""
    answer = serving.http.post(
        path, content=json.dumps(content) if isinstance(content, dict) else content
    )
    if answer.status_code == 200:
        assert '"error"' not in answer.text
        return 200, {}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 1000
    assert "secret" not in error["message"], "clients must not see the path of the weights"
    return answer.status_code, error


@pytest.mark.parametrize("path", BODIES)
def test_absurd_values_of_every_field_get_errors(bytewise, path):
    for field in FIELDS:
        for value in VALUES:
            status, error = send(bytewise, path, {**BODIES[path], field: value})
            assert status in (200, 400, 404), (field, str(value)[:40], error)
    assert send(bytewise, path, {**BODIES[path], "model": "gpt-9"})[1]["code"] == "model_not_found"
    for field in ("echo", "stop", "model", "logit_bias", "response_format", "user"):
        for deep in (900, 960, 100_000):
            body = json.dumps(BODIES[path])[:-1] + f', "{field}": {"[" * deep}{"]" * deep}}}'
            assert send(bytewise, path, body)[0] in (200, 400, 404)
    assert bytewise.idle_state().used == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a" * 96}, "prompt"),
        ({"prompt": [10**4000]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"stop": "x" * 1001}, "stop"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format",
        ),
        (
            {"regex": "((a?){60}){60}a{60}"},
            "regex",
        ),  # exceeds the parser's limits at the first token
        ({"grammar": "start: start"}, "grammar"),
    ],
)
def test_expensive_requests_are_refused_by_name(bytewise, fields, param):
    status, error = send(bytewise, "/v1/completions", {"prompt": "a", **fields})
    assert status == 400 and error["param"] == param, error


def test_guide_that_exceeds_its_limits_ends_only_its_answer(bytewise, monkeypatch):
    """As if the parser's limits were reached in the middle of an answer."""
    body = {"prompt": "a", "regex": "[ab]{9}", "max_tokens": 9}
    monkeypatch.setattr(
        "workers.inference.constrain.guide.Guide.advance",
        lambda self, token: setattr(self, "failed", True),
    )
    assert send(bytewise, "/v1/completions", body)[0] == 200
    cut = bytewise.http.post("/v1/completions", json=body).json()
    assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (1, "length")
    monkeypatch.undo()
    answer = bytewise.client().completions.create(
        model="bytewise", prompt="a", max_tokens=9, extra_body={"regex": "[ab]{9}"}
    )
    assert set(answer.choices[0].text) <= set("ab") and len(answer.choices[0].text) == 9


def test_template_error_does_not_show_its_path(bytewise):
    body = {"messages": [{"role": "narrator", "content": "a"}]}
    status, error = send(bytewise, "/v1/chat/completions", body)
    assert (status, error["code"]) == (
        400,
        "chat_template",
    ) and "bytewise: its chat template" in error["message"]


def test_malformed_bodies(bytewise):
    bodies = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b"\x00" * 9,
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        json.dumps({"prompt": "a"}).encode("utf-16"),
    ]
    for body in bodies:
        assert send(bytewise, "/v1/completions", body)[0] == 400, body[:20]
    assert send(bytewise, "/v1/completions", b'{"prompt": "' + b"x" * (33 << 20) + b'"}')[0] == 413
    for sent in (b"", b'{"prompt"'):  # and clients that disconnect early
        with socket.create_connection(tuple(bytewise.url[7:].split(":")), timeout=90) as connection:  # type: ignore[arg-type]
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + sent
            )
    assert (
        bytewise.http.get("/health").json() == {"status": "ok"} and bytewise.idle_state().used == 0
    )


class Malicious:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "not a complete safetensors file"),
        ("config.json", "config.json is not"),
        ("tokenizer.json", "tokenizer.json cannot be read"),
        ("generation_config.json", "is not JSON"),
        ("model.gguf", "not a complete GGUF file"),
        ("pytorch_model.bin", "is a pickle file"),
    ],
)
def test_pickle_instead_of_weights_is_refused_and_not_executed(name, message, tmp_path, capsys):
    weights = tmp_path / "weights"
    weights.mkdir()
    untrained_folder(weights)
    (weights / name).write_bytes(pickle.dumps(Malicious(str(tmp_path / "ran"))))
    if name == "pytorch_model.bin":
        (weights / "model.safetensors").unlink()
    path = weights / name if name == "model.gguf" else weights
    (tmp_path / "run.json").write_text(
        json.dumps({"kind": "serve", "model": {"path": str(path)}, "serve": {}})
    )
    assert main(["--spec", str(tmp_path / "run.json"), "--dir", str(tmp_path / "run")]) == 64
    assert message in capsys.readouterr().err and not (tmp_path / "ran").exists()
    assert json.loads((tmp_path / "run/rank-0/exit.json").read_text())["class"] == "user_error"
    events = tmp_path / "run/rank-0/events.jsonl"
    assert not events.exists() or "serving" not in events.read_text()
