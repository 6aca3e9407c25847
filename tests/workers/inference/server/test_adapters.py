"""A server with adapters: model ids, loading and unloading while it runs, replicas, refusals."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import openai
import pytest

from tests.workers.inference.adapters.folders import adapter_folder
from tests.workers.inference.untrained import BYTES, untrained_folder
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import UserError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, weights):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(adapter_folder(root / name, weights, seed=seed, rank=2 + seed))
        for seed, name in enumerate(("one", "two"))
    }


def text(client: openai.OpenAI, model: str, prompt: str = "w1 w2 w3") -> str:
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].text


def post(serving, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return serving.http.post(path, json=body, headers={**serving.control_headers, **headers})


def test_adapters_are_models_and_are_loaded_and_unloaded_live(start_server, adapters, weights):
    serving = start_server(adapters={"one": adapters["one"]}, adapter_slots=1)
    client = serving.client()
    cards = {each.id: each for each in client.models.list()}
    assert list(cards) == ["wordy", "one"] and cards["one"].parent == "wordy"
    assert client.models.retrieve("one").id == "one"
    base, one = text(client, "wordy"), text(client, "one")
    body = {"lora_name": "two", "lora_path": adapters["two"]}
    assert post(serving, LOAD, body).text == "Success: LoRA adapter 'two' added successfully."
    two = text(client, "two")
    assert len({base, one, two}) == 3
    assert [text(client, name) for name in ("one", "two", "wordy")] == [one, two, base]
    state = {each.name: each for each in serving.idle_state().adapters}
    assert (state["one"].rank, state["one"].requests, state["two"].requests) == (2, 2, 2)
    assert [each.slot for each in state.values()] == [None, 0], "one slot for both"
    again = post(serving, LOAD, body)
    assert again.status_code == 400 and "already loaded" in again.json()["error"]["message"]
    assert post(serving, UNLOAD, {"lora_name": "one"}).status_code == 200
    with pytest.raises(openai.NotFoundError, match="`one` does not exist"):
        text(client, "one")
    assert [each.id for each in client.models.list()] == ["wordy", "two"]
    gone = post(serving, UNLOAD, {"lora_name": "one"})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x"}, "lora_path is None; it must be a path"),
        ({"lora_name": "a b", "lora_path": "x"}, "lora_name is 'a b'"),
        ({"lora_name": "wordy", "lora_path": "x"}, "the base model's own name"),
        ({"lora_name": "x", "lora_path": "x", "rank": 1}, "Unrecognized request argument"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "/nowhere does not exist"),
        ([], "not a JSON object"),
    ],
)
def test_wrong_adapters_are_refused(body, message, slotted):
    refused = post(slotted, LOAD, body)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def slotted(tmp_path_factory, weights):
    from tests.workers.inference.server.conftest import Serving

    created = Serving(tmp_path_factory.mktemp("slotted"), weights, adapter_slots=2, max_seqs=4)
    yield created
    created.request_action("stop", grace_s=0)
    created.wait()


def test_adapters_of_another_base_and_strangers_are_refused(slotted, serving, adapters, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    folder = adapter_folder(
        tmp_path / "adapter", untrained_folder(other, {**BYTES, "ffn": 64}), rank=2
    )
    refused = post(slotted, LOAD, {"lora_name": "x", "lora_path": str(folder)})
    assert refused.status_code == 400 and "give the adapter's own base" in refused.text
    body = {"lora_name": "one", "lora_path": adapters["one"]}
    stranger = slotted.http.post(LOAD, json=body)
    assert stranger.status_code == 401
    assert "adapter_slots" in post(serving, LOAD, body).json()["error"]["message"]


def test_named_adapters_are_checked_before_serving(start_server, tmp_path, weights, adapters):
    from tests.workers.inference.server.conftest import Serving

    with pytest.raises(AssertionError):
        Serving(tmp_path / "no", weights, adapters={"one": str(tmp_path / "none")})
    created = Serving.__new__(Serving)
    with pytest.raises(AssertionError) as caught:
        created.__init__(tmp_path / "small", weights, adapters=adapters, adapter_rank=2)
    assert isinstance(created.outcome, UserError), caught.value
    assert "serve.adapters.two: " in str(created.outcome) and "rank 3" in str(created.outcome)


def test_replicas_all_have_an_adapter_and_its_requests_stay_on_one(
    start_server, adapters, monkeypatch
):
    addresses: dict[int, tuple[str, int]] = {}
    both = threading.Barrier(2, timeout=90)

    def exchange(address: tuple[str, int], environment: Environment) -> list[tuple[str, int]]:
        addresses[environment.rank] = address
        both.wait()
        return [addresses[0], addresses[1]]

    monkeypatch.setattr("workers.inference.server.server.exchange_addresses", exchange)
    serving = start_server(ranks=2, max_seqs=4, adapters={"one": adapters["one"]})
    client = serving.client()
    body = {"lora_name": "two", "lora_path": adapters["two"]}
    serving.until(lambda: True if both.n_waiting == 0 and len(addresses) == 2 else None)
    serving.until(lambda: True if post(serving, LOAD, body).status_code in (200, 400) else None)
    names = ("one", "two", "wordy") * 2
    answers = [text(client, name, f"w{place} w2") for place, name in enumerate(names)]
    assert len(set(answers)) == 6
    ranks = {name: set() for name in names}
    for rank in (0, 1):
        for line in serving.lines("requests", rank):
            ranks[line.get("adapter") or "wordy"].add(rank)
    assert len(ranks["one"]) == len(ranks["two"]) == 1 and len(ranks["wordy"]) == 2
    assert post(serving, UNLOAD, {"lora_name": "two"}).status_code == 200
    for place in range(4):
        with pytest.raises(openai.NotFoundError):
            text(client, "two", f"w{place}")
