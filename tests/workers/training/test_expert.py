"""Experts dealt out to ranks learn what one process learns, under every ZeRO stage, beside
pipelines, sequences cut in
parts and tensor parallelism; what travels is what the planner says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from orchestrator.planner.model.communication.engine_traffic import all_to_all_bytes
from orchestrator.planner.model.inputs import RECOMPUTE
from tests.workers.training.conftest import final_weights, make_spec, relative
from tests.workers.training.pool import ROOT
from workers.runtime.exits import UserError
from workers.training.setup.spec_loading import accept

RANKS = "tests.workers.training.expert_ranks"
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 80, "vocab": 257, "max_seq_len": 64}
STEPS = 12  # one flipped route ends parity
MOE = {"experts": 6, "top_k": 2, "expert_ffn": 24}
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS = {
    "mixtral": {
        "layers": 4,
        "moe": {**MOE, "aux_loss": 0.1, "capacity": 1.0},
        "bias": "all",
        "tie_embeddings": True,
    },
    "deepseek": {
        "attention": "mla",
        "mla": MLA,
        "moe": {
            **MOE,
            "experts": 12,
            "top_k": 3,
            "shared_experts": 1,
            "first_dense_layers": 1,
            "scoring": "sigmoid",
            "groups": 3,
            "groups_per_token": 2,
            "routed_scale": 2.5,
            "aux_loss": 0.01,
            "bias_update": 0.01,
        },
    },
}


def spec(name, plan, *, steps=STEPS, **train):
    model = {"name": name, **SMALL, **MODELS[name]}
    plan = {"micro_batch_size": 1, "global_batch_size": 4, **plan}
    # AdamW blows up rounding where gradients are all but zero
    optimizer = {"name": "adamw", "lr": 3e-4}
    defaults = {
        "optimizer": optimizer,
        "clip_norm": 0.5,
        "eval": {"every_steps": STEPS, "batches": 1},
    }
    checkpoint = {"every_steps": steps, "async": False}
    return make_spec(
        model,
        plan,
        **{"steps": steps, "seq_len": 20, "checkpoint": checkpoint, **defaults, **train},
    )


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return {name: train(spec(name, {}), tmp_path_factory.mktemp(name)) for name in MODELS}


RUNS = [
    ("mixtral", {"dp": 2, "ep": 2, "zero": 0, "recompute": "selective"}),
    (
        "deepseek",
        {"dp": 2, "ep": 2, "zero": 2, "recompute": "auto", "recompute_budget_bytes": 600_000},
    ),
    ("deepseek", {"cp": 2, "ep": 2}),
    ("mixtral", {"dp": 4, "ep": 2, "zero": 1}),
    ("mixtral", {"dp": 4, "ep": 2, "zero": 3, "recompute": "full"}),
    ("deepseek", {"dp": 4, "ep": 2, "zero": 3, "dp_replicate": 2}),
    ("mixtral", {"dp": 2, "pp": 2, "ep": 2, "zero": 2, "schedule": "zb1p"}),
    ("deepseek", {"dp": 2, "cp": 2, "ep": 4, "zero": 3}),
    ("deepseek", {"dp": 2, "tp": 2, "ep": 2, "zero": 1, "sequence_parallel": True}),
    ("mixtral", {"dp": 2, "tp": 2, "ep": 2, "zero": 3}),
]


def words(plan):
    return "-".join(f"{key[:4]}{value}" for key, value in plan.items())


@pytest.mark.parametrize(
    ("name", "plan"), RUNS, ids=[f"{name}-{words(plan)}" for name, plan in RUNS]
)
def test_a_run_is_that_of_one_process(name, plan, alone, train, tmp_path):
    result, one = train(spec(name, plan), tmp_path), alone[name]
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    loads = [key for key in one.points()[0]["values"] if key.startswith("moe/")]
    assert len(loads) > 12
    for value in ["loss", "grad_norm", "val_loss", *loads]:
        for rank in range(len(result.outcomes)):
            assert result.values(value, rank) == pytest.approx(one.values(value), rel=1e-5), (
                value,
                rank,
            )
    assert min(one.values("grad_norm")) > 0.5, "clipping must bite"
    theirs, ours = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(ours[name], theirs[name]) for name in theirs) <= 1e-4


@pytest.mark.parametrize(
    "plan",
    [
        {"precision": "bf16", "zero": 0},
        {"precision": "fp16", "zero": 3},
        {"precision": "fp8", "zero": 1},
    ],
    ids=lambda plan: plan["precision"],
)
def test_fewer_bits(plan, alone, train, tmp_path):
    result = train(spec("deepseek", {"dp": 2, "ep": 2, **plan}, steps=4, eval=None), tmp_path)
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(alone["deepseek"].values("loss")[:4], rel=5e-3)


def test_a_run_goes_on_with_experts_dealt_out_otherwise(alone, train, tmp_path):
    """Saved under ep 2, resumed under dp 2 sharded, then under ep 2 with two copies, sharded."""
    keep = {"checkpoint": {"every_steps": 100, "keep": 2}, "eval": None}
    plans = [{"dp": 2, "ep": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"dp": 4, "ep": 2, "zero": 3}]
    for part, plan in enumerate(plans, start=1):
        result = train(spec("deepseek", plan, **{**keep, "steps": STEPS * part // 3}), tmp_path)
        assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(alone["deepseek"].values("loss"), rel=1e-5)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bytes_that_travel_are_those_of_the_planner(recompute, pools):
    model, plan = (
        {**SMALL, **MODELS["deepseek"]},
        {"dp": 2, "ep": 2, "zero": 0, "recompute": recompute},
    )
    found = pools(2).call(
        f"{RANKS}:all_to_all_bytes", model=model, plan={**plan, "micro_batch_size": 2}
    )
    message = all_to_all_bytes(
        ep=2,
        accumulation=1,
        moe_layers=2,
        pp=1,
        micro_batch=2,
        seq_len=12,
        cp=1,
        top_k=3,
        hidden=32,
        compute_bytes=4,
        experts=12,
        recompute=RECOMPUTE[recompute],
    )
    assert sum(found) / len(found) == message


@pytest.mark.parametrize("backend", ["", "reference"], ids=["pieces", "all rows at once"])
def test_ranks_without_a_token_take_part(backend, pools):
    given = {
        "model": {**SMALL, **MODELS["mixtral"]},
        "plan": {"dp": 2, "ep": 2},
        "backend": backend,
    }
    for rank, found in enumerate(pools(2).call(f"{RANKS}:unevenly_routed", **given)):
        assert found["apart"] < 1e-6
        assert (found["largest"] > 0) == (rank == 0)


def test_fake_ranks_show_the_experts_of_each(tmp_path):
    plan = {"dp": 8, "ep": 2, "zero": 3, "dp_replicate": 2, "global_batch_size": 8}
    (tmp_path / "run.json").write_text(json.dumps(spec("deepseek", plan)))
    command = [
        sys.executable,
        "-m",
        "workers.training.main",
        "--spec",
        str(tmp_path / "run.json"),
        "--fake-ranks",
        "8",
    ]
    told = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert told["expert_mesh"] == {"expert_data": 4, "ep": 2}
    # 12 experts over ep 2, and over 2 of the 4 ranks that hold the same ones
    assert told["rank_0_shards"]["blocks.1.mlp.experts.up.weight"] == [3, 24, 32]
    assert sum(rank["parameter_bytes"] for rank in told["ranks"]) == 2 * 4 * told["parameters"]


def test_experts_lie_within_a_copy_of_the_model():
    with pytest.raises(
        UserError, match=r"plan\.ep: .* dp_shard x cp = 2 ranks, ep 4 does not divide them; .* ep 2"
    ):
        accept(spec("deepseek", {"dp": 4, "dp_replicate": 2, "zero": 3, "ep": 4}))
