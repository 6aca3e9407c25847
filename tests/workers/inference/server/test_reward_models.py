"""A served reward model: scores at /pooling and /score equal the model's own, bad requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.inference.server.conftest import SHAPE, Serving
from tests.workers.inference.untrained import untrained_folder
from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.contracts.specs.model import ModelSource
from workers.inference.evaluate.judge import open_judge
from workers.inference.generate.run import run_generate
from workers.inference.model_loading import load_model
from workers.inference.spec_loading import load_run
from workers.models.text.chat_format import open_chat_format
from workers.posttraining.produce.client import ChatClient
from workers.runtime.environment import read_environment
from workers.runtime.exit_codes import UserError

TEMPLATE = (
    "{% for each in messages %}w1 {{ each.content }} {% if each.role == 'assistant' %}w255 "
    "{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7 w8 w9"}]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    folder = Path(tmp_path_factory.mktemp("reward")) / "scorer"
    folder.mkdir()
    untrained_folder(folder, SHAPE | {"scalar_head": True, "tie_embeddings": False})
    shutil.copy(weights / "tokenizer.json", folder)
    settings = {"chat_template": TEMPLATE, "eos_token": "w255"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Any:
    created = Serving(tmp_path_factory.mktemp("run"), reward_model, max_seqs=4, kv_blocks=64)
    yield created
    created.request_action()
    created.wait()


def expected(reward_model: Path, ids: list[int]) -> float:
    """The scalar head's output at the last token, without a server."""
    source = ModelSource(path=str(reward_model))
    loaded = load_model(source, precision="fp32", device=torch.device("cpu"), scores=True)
    with torch.no_grad():
        return float(loaded.decoder(torch.tensor([ids]))[0, -1, 0])


def post(served: Serving, path: str, **body: Any) -> Any:
    return served.http.post(path, json={"model": "scorer", **body})


def test_scores_equal_the_models_own(served: Serving, reward_model: Path):
    answered = post(served, "/pooling", messages=CHAT).json()
    ids = [1, 5, 6, 1, 7, 8, 9, 255]
    own = pytest.approx(expected(reward_model, ids), abs=1e-5)
    assert answered["data"] == [{"index": 0, "object": "pooling", "data": [own]}]
    assert answered["object"] == "list" and answered["usage"]["prompt_tokens"] == len(ids)
    assert answered["id"].startswith("pooling-") and answered["model"] == "scorer"
    # ids, under /v1 as the control plane forwards it; a batch keeps its order
    batch = [ids, ids[:3], [2] * 40]
    many = post(served, "/v1/pooling", input=batch).json()["data"]
    for each, prompt in zip(many, batch, strict=True):
        assert each["data"] == [pytest.approx(expected(reward_model, prompt), abs=1e-5)]


def test_pairs_are_scored_as_training_encodes_them(served: Serving, reward_model: Path):
    scored = post(served, "/v1/score", text_1="w5 w6 ", text_2=["w7", "w8 w9"]).json()["data"]
    assert [each["index"] for each in scored] == [0, 1]
    chat = open_chat_format(reward_model)
    for each, answer in zip(scored, ["w7", "w8 w9"], strict=True):
        ids = chat.completion("w5 w6 ", answer, train_on="completion").ids
        assert ids[-1] == 255
        assert each["score"] == pytest.approx(expected(reward_model, ids), abs=1e-5)


def test_the_client_of_produce_runs_reads_its_scores(served: Serving, reward_model: Path):
    client = ChatClient(ServerSpec(url=f"{served.url}/v1", model="scorer"))
    own = expected(reward_model, [1, 5, 6, 1, 7, 8, 9, 255])
    assert client.reward(CHAT) == pytest.approx(own, abs=1e-5)
    client.close()


def test_it_judges_the_answers_of_two_models(served: Serving, reward_model: Path):
    scores = [expected(reward_model, [1, 5, 6, 1, *ids, 255]) for ids in ([7, 8, 9], [10])]
    judge = open_judge(ServerSpec(url=f"{served.url}/v1", model="scorer"), "reward")
    better, worse = ("win", "loss") if scores[1] > scores[0] else ("loss", "win")
    before, after = "w7 w8 w9", "w10"
    pairs = [("w5 w6", before, after), ("w5 w6", after, before), ("w5 w6", after, after)]
    assert judge.choose(pairs) == [better, worse, "tie"]
    judge.close()


def test_its_points_count_scores_and_no_tokens(served: Serving):
    post(served, "/pooling", input=[[1, 5, 6]] * 3)

    def first_scores() -> dict[str, float] | None:
        values = [each["values"] for each in served.lines("points")]
        return next((each for each in values if "inference/score_s" in each), None)

    values = served.until(first_scores)
    assert values["inference/score_s"] > 0 and values["inference/scores_per_s"] > 0
    assert not {"inference/ttft_s", "inference/tpot_s", "inference/tokens_per_s"} & values.keys()


def test_it_reports_that_it_scores(served: Serving):
    serving = served.event("serving")
    assert serving["pooling"] and not serving["chat"]
    assert served.http.get("/v1/models").json()["data"][0]["id"] == "scorer"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": CHAT[:1]}, "cannot generate text"),
        ("/v1/completions", {"prompt": "w1"}, "cannot generate text"),
        ("/pooling", {"messages": CHAT[:1]}, "the last message is of user"),
        ("/pooling", {}, "either messages or input"),
        ("/pooling", {"messages": CHAT, "input": "w1"}, "either messages or input"),
        ("/pooling", {"input": []}, "input must be a string"),
        ("/pooling", {"input": [999]}, "999"),
        ("/pooling", {"input": "w1", "use_activation": True}, "use_activation is True"),
        ("/pooling", {"input": "w1", "temperature": 1}, "Unrecognized request argument"),
        ("/pooling", {"input": [[1] * 300]}, "300 tokens"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1"] * 3}, "text_1 has 2 texts"),
        ("/score", {"text_1": "w1"}, "text_2 must be a text"),
    ],
)
def test_wrong_requests_are_refused(path: str, body: dict[str, Any], message: str, served: Serving):
    refused = post(served, path, **body)
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]


def test_a_language_model_gives_no_scores(serving: Serving):
    refused = serving.http.post("/pooling", json={"messages": CHAT})
    assert refused.status_code == 400 and "cannot score text" in refused.json()["error"]["message"]


def test_a_generate_run_refuses_a_reward_model(reward_model: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "w1"}\n')
    body = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
    spec = {"kind": "generate", "model": {"path": str(reward_model)}, "generate": body}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    run, environment = load_run(tmp_path / "spec.json"), read_environment(tmp_path, env={})
    with pytest.raises(UserError, match="a run of kind serve"):
        run_generate(run, environment)
