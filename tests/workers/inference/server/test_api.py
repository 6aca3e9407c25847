"""The server through the real `openai` client: answers, streams, log-probabilities, errors."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import openai
import pytest

from tests.workers.inference.server.conftest import open_request
from workers.inference.server.token_stream import TokenStream

CHAT: list[Any] = [{"role": "user", "content": "w7 w9"}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"repetition_penalty": 3}}


def test_stream_equals_complete_answer_and_chat_uses_template(serving):
    client = serving.client()
    assert [each.id for each in client.models.list()] == ["wordy"]
    complete = client.completions.create(
        model="wordy", prompt="w1 w7 w9 w2 w3", max_tokens=12, **GREEDY
    )
    text = complete.choices[0].text
    assert len(text.split()) == 12 and complete.choices[0].finish_reason == "length"
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (5, 12)
    chunks = list(
        client.completions.create(
            model="wordy",
            prompt=[1, 7, 9, 2, 3],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert "".join(each.choices[0].text for each in chunks[:-1]) == text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    chat = client.chat.completions.create(
        model="wordy", messages=CHAT, max_completion_tokens=12, **GREEDY
    )
    assert chat.choices[0].message.content == text and chat.choices[0].message.role == "assistant"
    with client.chat.completions.create(
        model="wordy", messages=CHAT, max_tokens=12, stream=True, **GREEDY
    ) as stream:
        deltas = [each.choices[0].delta for each in stream]
    assert deltas[0].role == "assistant" and "".join(each.content or "" for each in deltas) == text
    words = text.split()
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "w7 "}, {"type": "text", "text": "w9"}],
        }
    ]
    stop = f"{words[5]} {words[6][:2]}"
    for streamed in (False, True):
        answer = client.chat.completions.create(
            model="wordy", messages=parts, stop=stop, stream=streamed, **GREEDY
        )
        shown = (
            "".join(each.choices[0].delta.content or "" for each in answer) if streamed else None
        )
        shown = shown if streamed else answer.choices[0].message.content
        assert shown == text[: text.index(stop)], "no part of a stop string is shown"


def test_several_answers_seeds_and_logprobs(serving):
    client = serving.client()
    options: dict[str, Any] = {"model": "wordy", "max_tokens": 5, "seed": 3, "n": 2}
    first = client.completions.create(prompt=["w1 w2", [5, 6, 7]], logprobs=2, **options)
    again = client.completions.create(prompt=["w1 w2", [5, 6, 7]], **options)
    assert [each.index for each in first.choices] == [0, 1, 2, 3]
    assert [each.text for each in first.choices] == [each.text for each in again.choices]
    assert len({each.text for each in first.choices}) == 4 and first.usage.prompt_tokens == 5
    scores = first.choices[3].logprobs
    assert "".join(scores.tokens).replace("w", " w").split() == first.choices[3].text.split()
    assert max(scores.token_logprobs) < 0 and all(
        2 <= len(each) <= 3 for each in scores.top_logprobs
    )
    chat = client.chat.completions.create(
        messages=CHAT,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"77": 100},
        temperature=0,
        **options,
    )
    token = chat.choices[1].logprobs.content[0]
    assert token.token == "w77" and len(token.top_logprobs) == 3 and bytes(token.bytes) == b"w77"
    echoed = client.completions.create(prompt="w8", echo=True, **{**options, "n": 1})
    assert echoed.choices[0].text.startswith("w8") and len(echoed.choices[0].text) > 2


REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = [
    ({"model": "gpt-9"}, openai.NotFoundError, "model"),
    ({"max_tokens": 9000}, openai.BadRequestError, "max_tokens"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
    ({"top_p": 0}, openai.BadRequestError, "top_p"),
    ({"n": 100}, openai.BadRequestError, None),
    ({"stop": [""]}, openai.BadRequestError, "stop"),
    ({"stop": "x", "presence_penalty": 3}, openai.BadRequestError, "presence_penalty"),
    ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
    ({"logit_bias": {"7": 1000}}, openai.BadRequestError, "logit_bias"),
    ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "no"}},
            }
        },
        openai.BadRequestError,
        "response_format",
    ),
    ({"seed": 1.5}, openai.BadRequestError, "seed"),
    ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": "w1 " * 300}]}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "narrator", "content": "w1"}]}, openai.BadRequestError, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        openai.BadRequestError,
        None,
    ),
    ({"extra_body": {"unknown": 1}}, openai.BadRequestError, "unknown"),
    ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_requests_get_openai_errors(serving, stream):
    client = serving.client()
    for wrong, kind, param in REFUSED:
        if stream and "stream_options" in wrong:
            continue
        with pytest.raises(kind) as caught:
            client.chat.completions.create(
                **{"model": "wordy", "messages": CHAT, "stream": stream, **wrong}
            )
        assert caught.value.body["message"] and (param is None or caught.value.param == param), (
            wrong
        )
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="wordy", prompt=[1, 256], stream=stream)
    assert caught.value.param == "prompt"
    state = serving.idle_state()
    assert state.used == 0 and state.map.count("1") == 0


def test_malformed_requests_get_errors(serving):
    for content in (b"{", b"[1]", b'{"prompt": NaN}', b"[" * 100_000, b"\xff", b""):
        answer = serving.http.post("/v1/completions", content=content)
        assert (
            answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        ), content[:9]
    assert serving.http.get("/v1/engines").status_code == 404
    assert serving.http.get("/v1/completions").json()["error"]["code"] == "unknown_url"
    assert serving.http.get("/internal/state").status_code == 401, (
        "only the control plane may read the state"
    )
    assert serving.http.get("/health").json() == {"status": "ok"}


def test_disconnected_client_frees_everything(serving, steps):
    steps.hold()
    for number, stream in enumerate((True, False, True, False)):
        body = {"prompt": [number, 2, 3], "max_tokens": 240, "ignore_eos": True, "stream": stream}
        with open_request(serving, body) as connection:
            if stream:
                assert b"200 OK" in connection.recv(200)
            serving.until(lambda: steps.allow_one() or serving.state().used or None)
        assert serving.idle_state().used == 0
    steps.resume()
    finishes = [each["finish"] for each in serving.lines("requests")][-4:]
    assert finishes == ["aborted"] * 4
    serving.until(lambda: None if _live_streams(max_new_tokens=240) else True)


def _live_streams(*, max_new_tokens: int) -> list[TokenStream]:
    # of other tests' clients
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    return [
        each
        for each in gc.get_objects()
        if type(each) is TokenStream and each.request.sampling.max_new_tokens == max_new_tokens
    ]


def test_echo_with_log_probabilities_scores_the_prompt(serving):
    client = serving.client()
    options: dict[str, Any] = {"model": "wordy", "prompt": "w1 w7 w9 w2", "echo": True}
    scored = client.completions.create(**options, logprobs=2, max_tokens=0)
    choice = scored.choices[0]
    assert choice.text == "w1 w7 w9 w2" and choice.finish_reason == "length"
    assert scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens == 4
    assert choice.logprobs.tokens == ["w1", "w7", "w9", "w2"]
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} <= {2, 3}
    longer = client.completions.create(**options, logprobs=0, max_tokens=3, **GREEDY)
    logprobs = longer.choices[0].logprobs
    assert logprobs.token_logprobs[1:4] == pytest.approx(choice.logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == 7 and longer.choices[0].text.startswith("w1 w7 w9 w2")
    streamed = list(
        client.completions.create(**options, logprobs=0, max_tokens=3, stream=True, **GREEDY)
    )
    tokens = [token for each in streamed for token in each.choices[0].logprobs.tokens]
    assert tokens == logprobs.tokens
    extra = {"prompt_logprobs": 1}
    listed = client.completions.create(
        **{**options, "echo": False}, max_tokens=1, n=2, seed=1, extra_body=extra
    )
    for each in listed.choices:
        first, second = each.prompt_logprobs[:2]
        assert first is None and second["7"]["decoded_token"] == "w7"
        assert second["7"]["logprob"] == pytest.approx(choice.logprobs.token_logprobs[1])
    chat = client.chat.completions.create(
        model="wordy", messages=CHAT, max_tokens=1, extra_body=extra
    )
    assert len(chat.choices[0].prompt_logprobs) == chat.usage.prompt_tokens
    batch = client.completions.create(
        model="wordy", prompt=[[1, 7], [1, 7, 9]], echo=True, logprobs=0, max_tokens=0
    )
    assert [len(each.logprobs.tokens) for each in batch.choices] == [2, 3]
    only_text = client.completions.create(**options, max_tokens=0)
    assert only_text.choices[0].text == "w1 w7 w9 w2" and only_text.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        client.completions.create(model="wordy", prompt="w1", max_tokens=0)


def test_payloads_of_lm_evaluation_harness_are_answered_as_it_reads_them(serving):
    """Its local-completions: token ids, one new token that it drops, is_greedy by equality."""
    prompts = [[1, 7, 9, 2, 30], [5, 4, 3]]
    payload = {"model": "wordy", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = serving.http.post(
        "/v1/completions", json={**payload, "prompt": prompts, "echo": True}
    ).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        context = serving.http.post(
            "/v1/completions",
            json={**payload, "prompt": prompt[:-1], "max_tokens": 1, "ignore_eos": True},
        ).json()["choices"][0]["logprobs"]
        (likeliest,) = logprobs["top_logprobs"][len(prompt) - 1].keys() - {f"w{prompt[-1]}"} or {
            f"w{prompt[-1]}"
        }
        assert likeliest == context["tokens"][0]
        greedy = logprobs["token_logprobs"][-2] == max(logprobs["top_logprobs"][-2].values())
        assert greedy is (likeliest == f"w{prompt[-1]}")
