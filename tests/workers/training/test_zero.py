"""ZeRO 0 to 3 on 2 and 4 ranks equal one process, and hold the bytes of their stage."""

from __future__ import annotations

import pytest

from tests.matrix import FULL
from tests.orchestrator.planner.predicted import predicted
from tests.workers.training.conftest import TINY, final_weights, make_spec, relative
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.specs.model import ModelSpec

STEPS, WARMUP = (20, 5) if FULL else (4, 2)
BATCH = 8


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    """One process with gradient accumulation, clipping and a varying learning rate."""
    return {
        name: train(
            spec({"micro_batch_size": 2, "global_batch_size": BATCH}, **more),
            tmp_path_factory.mktemp(name),
        )
        for name, more in CASES.items()
    }


CASES = {"plain": {}, "untied gpt with dropout": {"gpt": True}}


def spec(plan, gpt=False):
    more = (
        {
            "bias": "all",
            "norm": "layernorm",
            "position": "learned",
            "gated_mlp": False,
            "dropout": 0.1,
        }
        if gpt
        else {}
    )
    tied = {"tie_embeddings": not gpt}
    # the number of ranks divides no width
    model = {
        "name": "ragged",
        "layers": 2,
        "hidden": 35,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 10,
        "ffn": 81,
        "vocab": 257,
        "max_seq_len": 64,
        **more,
        **tied,
    }
    settings = {
        "lr_schedule": {"name": "cosine", "warmup_steps": WARMUP},
        "eval": {"every_steps": STEPS // 2, "batches": 3},
    }
    settings |= {
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "checkpoint": {"every_steps": STEPS, "async": False},
    }
    return make_spec(model, plan, steps=STEPS, clip_norm=0.5, **settings)


PLANS = [
    {"dp": 1, "zero": 2, "micro_batch_size": 2},
    {"dp": 1, "zero": 3, "micro_batch_size": 2, "prefetch_layers": 1},
    *({"dp": 2, "zero": zero, "micro_batch_size": 2} for zero in range(4)),
    {"dp": 4, "zero": 1, "micro_batch_size": 2},
    {"dp": 4, "zero": 3, "micro_batch_size": 1, "prefetch_layers": 1},
    {"dp": 4, "dp_replicate": 2, "zero": 2, "micro_batch_size": 1},
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: "-".join(f"{k[:4]}{v}" for k, v in p.items()))
def test_equal_to_one_process(plan, reference, train, tmp_path):
    plan = {**plan, "global_batch_size": BATCH}
    result = train(spec(plan), tmp_path)
    one = reference["plain"]
    assert [o["class"] for o in result.outcomes] == ["ok"] * plan["dp"]
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    assert min(result.values("grad_norm")) > 0.5, "every step must clip"
    for name in ("loss", "grad_norm", "lr", "val_loss", "tokens_per_s", "mfu"):
        assert all(
            result.values(name, rank) == result.values(name) for rank in range(plan["dp"])
        ), name
    assert [p["tokens"] for p in result.points(plan["dp"] - 1)] == [
        BATCH * 16 * step for step in range(1, STEPS + 1)
    ]
    gathered = plan["zero"] >= 2  # also on a single rank
    assert (result.values("memory/buffers_bytes")[0] > 0) == gathered
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4


@pytest.mark.parametrize("zero", [0, 3])
def test_equal_micro_batches_get_equal_dropout_masks(zero, reference, train, tmp_path):
    plan = {"dp": 2, "zero": zero, "micro_batch_size": 2, "global_batch_size": BATCH}
    result = train(spec(plan, gpt=True), tmp_path)
    one = reference["untied gpt with dropout"]
    assert result.values("loss") == pytest.approx(one.values("loss"), rel=1e-5)
    assert result.values("val_loss") == pytest.approx(one.values("val_loss"), rel=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_of_each_stage(zero, train, tmp_path):
    plan = {"dp": 2, "zero": zero, "micro_batch_size": 2, "global_batch_size": 4}
    result = train(make_spec(None, plan, steps=1), tmp_path)
    names = ("params", "grads", "optimizer", "buffers")
    bytes_by_rank = {
        name: [result.values(f"memory/{name}_bytes", rank)[0] for rank in (0, 1)] for name in names
    }
    full = 4 * parameter_count(ModelSpec.from_dict(TINY)).total
    assert sum(bytes_by_rank["params"]) == (full if zero >= 2 else 2 * full)
    assert sum(bytes_by_rank["grads"]) == (full if zero >= 2 else 2 * full)
    # two fp32 moments, and a step counter of 4 bytes per parameter tensor
    moments = 2 * full if zero else 4 * full
    assert moments <= sum(bytes_by_rank["optimizer"]) <= moments + 2 * 4 * 21
    gathered_bytes = {0: 0, 1: 0, 2: full}
    if zero in gathered_bytes:
        assert bytes_by_rank["buffers"] == [gathered_bytes[zero]] * 2
    else:
        assert 0 < bytes_by_rank["buffers"][0] < full


@pytest.mark.parametrize(
    ("option", "layers"),
    [
        ({"prefetch_layers": 0}, 0),
        ({"prefetch_layers": 2, "max_live_params": 56_000}, 1),
        ({"param_persistence_threshold": 20_000}, 3),
    ],
    ids=str,
)
def test_zero_3_keeps_gathered_what_its_limits_allow(option, layers, train, tmp_path):
    """A block of 11,840 parameters, 3 of them; head and table have 8,192 each."""
    model = {**TINY, "layers": 3, "kv_heads": 4, "tie_embeddings": False}
    plan = {"dp": 2, "zero": 3, "micro_batch_size": 1, "global_batch_size": 4}
    plain = train(make_spec(model, plan, steps=2), tmp_path / "plain")
    result = train(make_spec(model, {**plan, **option}, steps=2), tmp_path / "option")
    assert result.values("loss") == pytest.approx(plain.values("loss"), rel=1e-6)
    more = result.values("memory/buffers_bytes")[0] - plain.values("memory/buffers_bytes")[0]
    table = 8192 if "param_persistence_threshold" in option else 0
    assert more == 4 * (layers * 11_840 + table)
    tables = [predicted(ModelSpec.from_dict(model), each) for each in (plan, {**plan, **option})]
    resident = [float(each["gathered_bytes"].max()) for each in tables]
    assert resident[1] - resident[0] == more


def test_sgd_with_momentum(train, tmp_path):
    sgd = {
        "optimizer": {
            "name": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.01,
        }
    }
    plan = {"micro_batch_size": 2, "global_batch_size": 4}
    one = train(make_spec(None, plan, steps=STEPS, **sgd), tmp_path / "one")
    for zero in (1, 3):
        two = train(
            make_spec(None, {**plan, "dp": 2, "zero": zero}, steps=STEPS, **sgd),
            tmp_path / str(zero),
        )
        assert two.values("loss") == pytest.approx(one.values("loss"), rel=1e-5)
