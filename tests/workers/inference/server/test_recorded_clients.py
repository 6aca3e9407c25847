"""Requests that litellm, langchain-openai, instructor and lm-eval sent are answered as they expect.

`recorded_clients/record.py` recorded them with the real clients, which are not dependencies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.workers.inference.server.conftest import Serving
from tests.workers.inference.server.recorded_clients.weights import byte_weights

FOLDER = Path(__file__).parent / "recorded_clients"
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
CLIENTS = ["instructor", "langchain-openai", "litellm", "lm-eval"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    weights = byte_weights(tmp_path_factory.mktemp("recorded") / "weights")
    created = Serving(tmp_path_factory.mktemp("serve"), weights, max_seqs=4, kv_blocks=400)
    yield created
    created.request_action("stop", grace_s=0)
    created.wait()


def test_all_recordings_are_listed():
    assert sorted(path.stem for path in FOLDER.glob("*.jsonl")) == CLIENTS


@pytest.mark.parametrize("client", CLIENTS)
def test_recorded_requests_are_answered(client, server):
    about, *requests = [
        json.loads(line) for line in (FOLDER / f"{client}.jsonl").read_text().splitlines()
    ]
    assert about["client"] == client and about["version"] and requests
    for request in requests:
        body = _shortened(request["body"])
        answer = server.http.request(request["method"], request["path"], json=body)
        assert answer.status_code == request["status"] == 200, answer.text
        if request["path"].endswith("/chat/completions"):
            _check_chat(body, answer)
        else:
            _check_completion(body, answer.json()["choices"])


def _shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The request with a short answer: fewer tokens, or no spaces where all are needed."""
    called = body.get("tools") and body.get("tool_choice", "auto") not in ("auto", "none")
    if called or "response_format" in body:
        return {**body, "logit_bias": {str(LETTERS.index(space)): -100 for space in "ĠĊ"}}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return {**body, limit: min(body[limit], 12)}


def _check_chat(body: dict[str, Any], answer: Any) -> None:
    """Answers have OpenAI's types; calls match their tool, and texts the format."""
    if body.get("stream"):
        content, calls, finish = _streamed(answer.text)
    else:
        (choice,) = ChatCompletion.model_validate(answer.json()).choices
        content, finish = choice.message.content or "", choice.finish_reason
        calls = [
            (each.function.name, each.function.arguments)
            for each in choice.message.tool_calls or ()
        ]
    tools = {each["function"]["name"]: each["function"] for each in body.get("tools", ())}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), tools[name]["parameters"])
    choice = body.get("tool_choice", "auto")
    if tools and choice not in ("auto", "none"):
        assert calls and not content
        assert finish == ("tool_calls" if choice == "required" else "stop")
    elif choice == "none":
        assert not calls
    response_format = body.get("response_format", {"type": "text"})
    if response_format["type"] != "text" and finish == "stop":
        schema = response_format.get("schema", {"type": "object"})
        schema = response_format.get("json_schema", {}).get("schema", schema)
        jsonschema.validate(json.loads(content), schema)


def _streamed(text: str) -> tuple[str, list[tuple[str, str]], str | None]:
    """The content, calls and finish reason of a stream."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert data[-1] == "[DONE]"
    content, calls, finish = "", dict[int, list[str]](), None
    for chunk in (ChatCompletionChunk.model_validate_json(each) for each in data[:-1]):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                name, arguments = calls.setdefault(piece.index, ["", ""])
                name += piece.function.name or ""
                calls[piece.index] = [name, arguments + (piece.function.arguments or "")]
    return content, [(name, arguments) for name, arguments in calls.values()], finish


def _check_completion(body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """An echoed prompt has a log-probability per token, as lm-eval reads them."""
    prompts = body["prompt"]
    several = isinstance(prompts, list) and isinstance(prompts[0], list)
    assert len(choices) == (len(prompts) if several else 1)
    for number, choice in enumerate(choices):
        logprobs = choice["logprobs"]
        if body.get("logprobs") is None:
            assert isinstance(choice["text"], str) and logprobs is None
        elif body.get("echo"):
            first, *others = logprobs["token_logprobs"]
            assert first is None and all(value <= 0 for value in others)
            assert len(others) == len(prompts[number]) + body["max_tokens"] - 1
            assert all(max(top.values()) <= 0 for top in logprobs["top_logprobs"][1:])
        else:
            assert len(logprobs["tokens"]) == body["max_tokens"]


def test_json_object_with_a_schema_is_exact(server):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    body = {"model": "weights", "max_tokens": 200, "messages": [{"role": "user", "content": "?"}]}
    for format in ({"schema": schema}, {}):
        answer = server.http.post(
            "/v1/chat/completions",
            json={**body, "seed": 1, "response_format": {"type": "json_object", **format}},
        ).json()
        if format:
            content = json.loads(answer["choices"][0]["message"]["content"])
            assert set(content) == {"city"}
    wrong = {"type": "json_object", "schema": "city"}
    answer = server.http.post("/v1/chat/completions", json={**body, "response_format": wrong})
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
