"""What a run tells of its model: norms by layer and texts at checkpoints, under every plan those of
one process.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.workers.training.conftest import TINY, make_spec
from tests.workers.training.pool import TIMEOUT_S
from workers.runtime.exits import UserError
from workers.training.data.prompts import Prompts, open_prompts
from workers.training.data.tokenizer import BYTES
from workers.training.loop import text_samples
from workers.training.setup.spec_loading import accept

BATCH = {"micro_batch_size": 2, "global_batch_size": 4}
STEPS, SAVED = 8, (4, 8)
SAMPLES = {
    "prompts": ["First Citizen:\nSpeak, ", "é", "The king is"],
    "max_tokens": 9,
    "temperature": 0.7,
}
ROUTED = {
    **TINY,
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 24, "bias_update": 0.0, "aux_loss": 0.01},
}
PLANS = {
    "zero 3": {"dp": 2, "zero": 3},
    "tensor and sequence": {"tp": 2, "sequence_parallel": True},
    "pipeline in a V": {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    "pipedream": {"pp": 2, "schedule": "pipedream"},
    "context": {"cp": 2},
    "experts": {"dp": 2, "ep": 2, "zero": 3},
}


def spec(plan, **more):
    model = (
        ROUTED
        if plan.get("ep")
        else {**TINY, "layers": 4, "tie_embeddings": plan.get("schedule") != "pipedream"}
    )
    train = {
        "seq_len": 32,
        "samples": SAMPLES,
        "checkpoint": {"every_steps": 4},
        "log_every": 3,
        **more,
    }
    return make_spec(
        model, {**BATCH, **plan}, steps=STEPS, optimizer={"name": "sgd", "lr": 0.1}, **train
    )


def texts(result, rank=0):
    told = [each["data"] for each in result.events(rank) if each["type"] == "samples_written"]
    return {each["step"]: [sample["token_ids"] for sample in each["samples"]] for each in told}


def by_layer(result, name):
    return [
        {k: v for k, v in point["values"].items() if k.startswith(f"{name}/")}
        for point in result.points()
    ]


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    """The same model in one process: dense and tied, dense, routed."""
    made = {}

    def run(plan):
        kind = (bool(plan.get("ep")), plan.get("schedule") == "pipedream")
        if kind not in made:
            whole = spec(plan)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(text_samples, "GRACE_S", TIMEOUT_S)  # as on the ranks of a pool
                made[kind] = train({**whole, "plan": BATCH}, tmp_path_factory.mktemp("alone"))
        return made[kind]

    return run


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_tells_what_one_process_tells(name, alone, train, tmp_path):
    plan, one = PLANS[name], alone(PLANS[name])
    result = train(spec(plan), tmp_path)
    assert [outcome["class"] for outcome in [*one.outcomes, *result.outcomes]] == ["ok"] * 3
    for point in result.points():
        squares = sum(v**2 for k, v in point["values"].items() if k.startswith("grad_norm/"))
        assert math.sqrt(squares) == pytest.approx(point["values"]["grad_norm"], rel=1e-12)
    assert [point["step"] for point in result.points()] == [3, 6, 8]
    assert "grad_norm/embedding" not in result.points(1)[0]["values"], "told once"
    grads, weights = by_layer(result, "grad_norm"), by_layer(result, "weight_norm")
    layers = 2 if plan.get("ep") else 4
    assert set(grads[0]) == {
        f"grad_norm/{n}" for n in ("embedding", *(f"layer_{i}" for i in range(layers)), "head")
    }
    assert [bool(each) for each in weights] == [True, False, True], (
        "the first logged step and the last"
    )
    assert texts(result, 1) == {}
    if name == "pipedream":  # other weights than one process has, by its staleness
        assert set(texts(result)) == set(SAVED) and all(len(new) == 9 for new in texts(result)[4])
        return
    for ours, theirs in (
        (grads, by_layer(one, "grad_norm")),
        (weights, by_layer(one, "weight_norm")),
    ):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(other, rel=2e-5)
    assert texts(result) == texts(one)


def test_texts_of_a_run(alone):
    one = alone({})
    found = texts(one)
    assert set(found) == set(SAVED)
    assert len({str(each) for each in found.values()}) == 2, "they change as the model learns"
    told = [each["data"] for each in one.events() if each["type"] == "samples_written"][-1]
    assert [each["prompt"] for each in told["samples"]] == SAMPLES["prompts"]
    assert all(BYTES.decode(each["token_ids"]).translate({0: "\ufffd"}) for each in told["samples"])
    assert (told["temperature"], told["cut_short"]) == (0.7, False)


def test_time_for_texts_is_bounded(train, tmp_path, monkeypatch):
    monkeypatch.setattr(text_samples, "SHARE", 0.0)
    monkeypatch.setattr(text_samples, "GRACE_S", 1e-6)
    found = train({**spec({}), "plan": BATCH}, tmp_path)
    [told] = [each["data"] for each in found.events() if each["type"] == "samples_written"]
    assert (told["step"], told["cut_short"]) == (4, True)
    assert [len(each["token_ids"]) for each in told["samples"]] == [1, 1, 1]


def test_prompts_from_the_held_out_text(tmp_path):
    run = accept(make_spec(samples={"count": 4}, seq_len=48))
    found = open_prompts(run, run.train.writes, cache=tmp_path, kept=tmp_path)
    words = [found.words(ids) for ids in found.ids]
    assert len(set(words)) == 4 and all(1 <= len(ids) <= 24 for ids in found.ids)
    assert all(text == text.strip() and " " in text for text in words), words
    assert found.words([72, 0, 255, 256, 105]) == "H\ufffd\ufffd\ufffdi", (
        "whatever a model writes can be shown"
    )
    assert found.continuation([0xC3], [0xA9, 0x21]) == "\ufffd!", (
        "a character cut in two between prompt and text"
    )
    assert accept(make_spec()).train.writes is None
    assert accept(
        {**make_spec(checkpoint={}), "train": {"steps": 1, "seq_len": 8, "checkpoint": {}}}
    ).train.writes.count


def test_prompts_that_no_model_can_go_on_from(tmp_path):
    long = accept(make_spec(samples={"prompts": ["x" * 16]}))
    with pytest.raises(
        UserError, match=r"train\.samples\.prompts\.0: 16 tokens.* try one of 1 to 15"
    ):
        open_prompts(long, long.train.samples, cache=tmp_path, kept=tmp_path)
    (np.arange(4000) % 200).astype(np.uint16).tofile(tmp_path / "ids.bin")
    data = {"path": str(tmp_path / "ids.bin"), "format": "tokens"}
    with pytest.raises(UserError, match="without a tokenizer"):
        accept({**make_spec(samples={"prompts": ["x"]}), "data": data})
    drawn = accept({**make_spec(samples={"count": 1}), "data": data})
    found = open_prompts(drawn, drawn.train.samples, cache=tmp_path, kept=tmp_path)
    assert isinstance(found, Prompts) and len(found.ids[0]) == 8
    assert found.words(found.ids[0]) is None and found.continuation(found.ids[0], [1]) is None
