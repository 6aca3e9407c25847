"""Norms by layer and sample texts that a run reports: under every plan equal to one process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.workers.training.conftest import TINY, make_spec
from tests.workers.training.pool import TIMEOUT_S
from workers.runtime.exit_codes import UserError
from workers.training.data.prompts import Prompts, open_prompts
from workers.training.data.tokenizer import BYTES
from workers.training.loop import text_samples
from workers.training.setup.spec_loading import accept

BATCH = {"micro_batch_size": 2, "global_batch_size": 4}
STEPS, SAVED = 5, (2, 4, 5)
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
        "checkpoint": {"every_steps": 2},
        "log_every": 2,
        **more,
    }
    return make_spec(
        model, {**BATCH, **plan}, steps=STEPS, optimizer={"name": "sgd", "lr": 0.1}, **train
    )


def texts(result, rank=0):
    return {
        event["data"]["step"]: [sample["token_ids"] for sample in event["data"]["samples"]]
        for event in result.events(rank)
        if event["type"] == "samples_written"
    }


def by_layer(result, name):
    return [
        {k: v for k, v in point["values"].items() if k.startswith(f"{name}/")}
        for point in result.points()
    ]


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    """`reference(plan)`: the model of the plan in one process, trained once."""
    runs = {}

    def run(plan):
        kind = (bool(plan.get("ep")), plan.get("schedule") == "pipedream")
        if kind not in runs:
            document = spec(plan)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(text_samples, "GRACE_S", TIMEOUT_S)  # as on the ranks of a pool
                runs[kind] = train(
                    {**document, "plan": BATCH}, tmp_path_factory.mktemp("reference")
                )
        return runs[kind]

    return run


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_reports_the_same_as_one_process(name, reference, train, tmp_path):
    plan, one = PLANS[name], reference(PLANS[name])
    result = train(spec(plan), tmp_path)
    assert [outcome["class"] for outcome in [*one.outcomes, *result.outcomes]] == ["ok"] * 3
    for point in result.points():
        squares = sum(v**2 for k, v in point["values"].items() if k.startswith("grad_norm/"))
        assert math.sqrt(squares) == pytest.approx(point["values"]["grad_norm"], rel=1e-12)
    assert [point["step"] for point in result.points()] == [2, 4, 5]
    assert "grad_norm/embedding" not in result.points(1)[0]["values"], "one rank reports it"
    grads, weights = by_layer(result, "grad_norm"), by_layer(result, "weight_norm")
    layers = 2 if plan.get("ep") else 4
    assert set(grads[0]) == {
        f"grad_norm/{n}" for n in ("embedding", *(f"layer_{i}" for i in range(layers)), "head")
    }
    assert [bool(norms) for norms in weights] == [True, False, True], (
        "the first logged step and the last"
    )
    assert texts(result, 1) == {}
    if name == "pipedream":  # stale weights differ from those of one process
        assert set(texts(result)) == set(SAVED) and all(len(new) == 9 for new in texts(result)[4])
        return
    for actual, expected in (
        (grads, by_layer(one, "grad_norm")),
        (weights, by_layer(one, "weight_norm")),
    ):
        assert len(actual) == len(expected)
        for norms, expected_norms in zip(actual, expected, strict=True):
            assert norms == pytest.approx(expected_norms, rel=2e-5)
    assert texts(result) == texts(one)


def test_texts_of_a_run(reference):
    one = reference({})
    by_step = texts(one)
    assert set(by_step) == set(SAVED)
    assert by_step[SAVED[0]] != by_step[STEPS], "texts change as the model learns"
    data = [event["data"] for event in one.events() if event["type"] == "samples_written"][-1]
    samples = data["samples"]
    assert [sample["prompt"] for sample in samples] == SAMPLES["prompts"]
    assert all(BYTES.decode(sample["token_ids"]).translate({0: "\ufffd"}) for sample in samples)
    assert (data["temperature"], data["cut_short"]) == (0.7, False)


def test_time_for_texts_is_bounded(train, tmp_path, monkeypatch):
    monkeypatch.setattr(text_samples, "SHARE", 0.0)
    monkeypatch.setattr(text_samples, "GRACE_S", 1e-6)
    result = train({**spec({}), "plan": BATCH}, tmp_path)
    [data] = [event["data"] for event in result.events() if event["type"] == "samples_written"]
    assert (data["step"], data["cut_short"]) == (2, True)
    assert [len(sample["token_ids"]) for sample in data["samples"]] == [1, 1, 1]


def test_prompts_from_the_held_out_text(tmp_path):
    run = accept(make_spec(samples={"count": 4}, seq_len=48))
    prompts = open_prompts(run, run.train.writes, cache=tmp_path, checkpoints=tmp_path)
    words = [prompts.text(ids) for ids in prompts.ids]
    assert len(set(words)) == 4 and all(1 <= len(ids) <= 24 for ids in prompts.ids)
    assert all(text == text.strip() and " " in text for text in words), words
    assert prompts.text([72, 0, 255, 256, 105]) == "H\ufffd\ufffd\ufffdi", (
        "invalid bytes and tokens become replacement characters"
    )
    assert prompts.continuation([0xC3], [0xA9, 0x21]) == "\ufffd!", (
        "a character that is split between prompt and text"
    )
    assert accept(make_spec()).train.writes is None
    assert accept(
        {**make_spec(checkpoint={}), "train": {"steps": 1, "seq_len": 8, "checkpoint": {}}}
    ).train.writes.count


def test_unusable_prompts_are_refused(tmp_path):
    long = accept(make_spec(samples={"prompts": ["x" * 16]}))
    with pytest.raises(
        UserError, match=r"train\.samples\.prompts\.0: 16 tokens.* Use one of 1 to 15"
    ):
        open_prompts(long, long.train.samples, cache=tmp_path, checkpoints=tmp_path)
    (np.arange(4000) % 200).astype(np.uint16).tofile(tmp_path / "ids.bin")
    data = {"path": str(tmp_path / "ids.bin"), "format": "tokens"}
    with pytest.raises(UserError, match="token files have no tokenizer, so prompts"):
        accept({**make_spec(samples={"prompts": ["x"]}), "data": data})
    drawn_run = accept({**make_spec(samples={"count": 1}), "data": data})
    prompts = open_prompts(drawn_run, drawn_run.train.samples, cache=tmp_path, checkpoints=tmp_path)
    assert isinstance(prompts, Prompts) and len(prompts.ids[0]) == 8
    assert (
        prompts.text(prompts.ids[0]) is None and prompts.continuation(prompts.ids[0], [1]) is None
    )
