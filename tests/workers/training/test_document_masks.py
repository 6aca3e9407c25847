"""Attention masks between documents: every technique equals one process on ragged documents."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.matrix import FULL
from tests.workers.training.conftest import final_weights, make_spec, relative

STEPS = 20 if FULL else 4

DENSE = {
    "name": "dense",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 88,
    "vocab": 257,
    "tie_embeddings": False,
}
GPT = {
    "name": "gpt",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn": 96,
    "vocab": 256,
    "norm": "layernorm",
    "bias": "all",
    "position": "learned",
    "gated_mlp": False,
    "activation": "gelu",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of a few bytes up to more than a sequence."""
    path = tmp_path_factory.mktemp("data") / "ragged.jsonl"
    lengths = np.random.default_rng(1).integers(0, 12, 500) ** 2 // 2
    texts = [
        " ".join(str(n * index % 97) for index in range(1 + length // 3))
        for n, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"path": str(path), "format": "jsonl"}


def spec(data, model, plan, **train):
    plan = {"global_batch_size": 8, "micro_batch_size": 2, **plan}
    settings = {"steps": STEPS, "seq_len": 30, "optimizer": {"name": "adamw", "lr": 3e-4}}
    steps = train.get("steps", STEPS)
    settings |= {
        "eval": {"every_steps": steps, "batches": 1},
        "checkpoint": {"every_steps": steps, "async": False},
    }
    return {**make_spec(model | {"max_seq_len": 64}, plan, **(settings | train)), "data": data}


@pytest.fixture(scope="module")
def reference(data, train, tmp_path_factory):
    """`reference(model)`: the run in one process, trained once."""
    runs = {}

    def run(model):
        name = model["name"]
        if name not in runs:
            runs[name] = train(spec(data, model, {}), tmp_path_factory.mktemp("reference"))
        return runs[name]

    return run


PLANS = [
    (DENSE, {"dp": 2, "zero": 3, "recompute": "full"}),
    (GPT, {"tp": 2, "sequence_parallel": True}),
    (DENSE, {"pp": 2, "schedule": "zbv", "recompute": "full"}),
    (GPT, {"cp": 2, "recompute": "selective"}),
]


@pytest.mark.parametrize(("model", "plan"), PLANS, ids=[f"{m['name']} {p}" for m, p in PLANS])
def test_equal_to_one_process(model, plan, reference, data, train, tmp_path):
    result, one = train(spec(data, model, plan), tmp_path), reference(model)
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    # its gradient is only rounding error, which Adam amplifies
    ignored = {name for name in expected if model is GPT and name.endswith("attn.k.bias")}
    assert max(relative(actual[name], expected[name]) for name in expected.keys() - ignored) <= 1e-4


def test_resumes_exactly_under_another_plan(reference, data, train, tmp_path):
    checkpoint = {"every_steps": STEPS // 2}
    train(
        spec(data, DENSE, {"dp": 2, "zero": 2}, steps=STEPS // 2, checkpoint=checkpoint), tmp_path
    )
    resumed = train(spec(data, DENSE, {}, checkpoint=checkpoint), tmp_path)
    assert resumed.values("loss") == pytest.approx(reference(DENSE).values("loss"), rel=1e-5)


def test_masks_are_the_default(reference, data, train, tmp_path):
    masked = reference(DENSE).values("loss")
    without = train(spec({**data, "document_masks": False}, DENSE, {}, steps=1), tmp_path / "not")
    assert abs(without.values("loss")[0] / masked[0] - 1) > 1e-5
    stale = train(
        spec(data, DENSE, {"pp": 2, "schedule": "pipedream"}, steps=1), tmp_path / "stale"
    )
    assert stale.values("loss")[0] == pytest.approx(masked[0], rel=1e-6)


def test_recomputation_and_precision(reference, data, train, tmp_path):
    exact = reference(DENSE).values("loss")[:3]
    measured = train(
        spec(data, DENSE, {"recompute": "auto", "recompute_budget_bytes": 600_000}, steps=3),
        tmp_path,
    )
    assert measured.values("loss") == exact
    [choice] = [event["data"] for event in measured.events() if event["type"] == "recompute_chosen"]
    layers = [layer for stage in choice["stages"] for layer in stage["layers"]]
    assert any(layer["kind"] == "some" for layer in layers), layers
    for precision in ("bf16", "fp16", "fp8"):
        rounded = train(spec(data, DENSE, {"precision": precision}, steps=3), tmp_path / precision)
        assert rounded.values("loss") == pytest.approx(exact, rel=5e-3), precision


def test_masks_without_document_boundaries_are_refused(train, tmp_path):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "a.bin")
    data = {"path": str(tmp_path / "a.bin"), "format": "tokens", "document_masks": True}
    outcome = train(spec(data, DENSE | {"vocab": 2000}, {}), tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert (
        "data.document_masks: document boundaries are unknown in a. Set document_end"
        in outcome["reason"]
    )


def test_dynamic_rope_scaling_is_refused_with_masks(data, train, tmp_path):
    scaled = DENSE | {
        "rope": {"scaling": {"name": "dynamic", "factor": 2.0, "original_max_seq_len": 16}}
    }
    [outcome] = train(spec(data, scaled, {}, steps=1), tmp_path).outcomes
    assert (
        outcome["class"] == "user_error"
        and "Use name yarn or linear, seq_len 16" in outcome["reason"]
    )
