"""Expert parallelism equals one process, with ZeRO, pipeline, context and tensor parallelism."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.model.columns.codes import RECOMPUTE
from orchestrator.planner.model.communication.collective_bytes import all_to_all_bytes
from tests.matrix import FULL, select
from tests.workers.training.conftest import final_weights, make_spec, relative
from tests.workers.training.pool import Result
from workers.runtime.exit_codes import UserError
from workers.training.setup.fake_ranks import describe_fake_ranks
from workers.training.setup.spec_loading import accept

RANKS = "tests.workers.training.expert_ranks"
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 80, "vocab": 257, "max_seq_len": 64}
STEPS = 12 if FULL else 3  # few: one expert choice that flips by rounding breaks parity
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
    # AdamW amplifies rounding where gradients are nearly zero
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
def reference(train, tmp_path_factory):
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


SELECTED = [0, 1, 5, 6, 7, 8]


def label(plan):
    return "-".join(f"{key[:4]}{value}" for key, value in plan.items())


@pytest.mark.parametrize(
    ("name", "plan"),
    # by default without plans whose axes and ZeRO stages the others cover
    select([pytest.param(*run, id=f"{run[0]}-{label(run[1])}") for run in RUNS], SELECTED),
)
def test_run_equals_one_process(name, plan, reference, train, tmp_path):
    result, one = train(spec(name, plan), tmp_path), reference[name]
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    loads = [key for key in one.points()[0]["values"] if key.startswith("moe/")]
    assert len(loads) > 12
    for value in ["loss", "grad_norm", "val_loss", *loads]:
        for rank in range(len(result.outcomes)):
            assert result.values(value, rank) == pytest.approx(one.values(value), rel=1e-5), (
                value,
                rank,
            )
    assert min(one.values("grad_norm")) > 0.5, "every step must clip"
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4


def test_a_capacity_avoids_waiting_for_counts(reference, pools, tmp_path):
    """With padded messages, as on a GPU, in training; validation has no capacity."""
    given = spec("mixtral", {"dp": 2, "ep": 2, "zero": 1})
    outcomes = pools(2).call(f"{RANKS}:train_without_waiting", spec=given, directory=str(tmp_path))
    assert [each["class"] for each in outcomes] == ["ok", "ok"], outcomes
    # by layer, step and sequence of a rank
    assert outcomes[0]["calls"] == 4 * STEPS * 2
    result, one = Result(outcomes, tmp_path), reference["mixtral"]
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    expected, actual = final_weights(one, STEPS), final_weights(result, STEPS)
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4


@pytest.mark.parametrize(
    "plan",
    [
        {"precision": "bf16", "zero": 0},
        {"precision": "fp16", "zero": 3},
        {"precision": "fp8", "zero": 1},
    ],
    ids=lambda plan: plan["precision"],
)
def test_low_precision_follows_fp32(plan, reference, train, tmp_path):
    result = train(spec("deepseek", {"dp": 2, "ep": 2, **plan}, steps=3, eval=None), tmp_path)
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(
        reference["deepseek"].values("loss")[:3], rel=5e-3
    )


def test_resume_with_other_expert_sharding(reference, train, tmp_path):
    """Saved under ep 2, resumed under sharded dp 2, then under ep 2 with two sharded copies."""
    settings = {"checkpoint": {"every_steps": 100, "keep": 2}, "eval": None}
    plans = [{"dp": 2, "ep": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"dp": 4, "ep": 2, "zero": 3}]
    for attempt, plan in enumerate(plans, start=1):
        result = train(spec("deepseek", plan, **settings, steps=STEPS * attempt // 3), tmp_path)
        assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(reference["deepseek"].values("loss"), rel=1e-5)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_to_all_bytes_equal_the_planners(recompute, pools):
    model, plan = (
        {**SMALL, **MODELS["deepseek"]},
        {"dp": 2, "ep": 2, "zero": 0, "recompute": recompute},
    )
    sent = pools(2).call(
        f"{RANKS}:all_to_all_bytes", model=model, plan={**plan, "micro_batch_size": 2}
    )
    columns = {
        "ep": 2,
        "accumulation": 1,
        "moe_layers": 2,
        "pp": 1,
        "micro_batch": 2,
        "seq_len": 12,
        "cp": np.array(1),
        "top_k": 3,
        "hidden": 32,
        "compute_bytes": 4,
        "experts": 12,
        "recompute": RECOMPUTE[recompute],
        "capacity_limit": np.array(0.0),
        "is_cpu": np.array(1.0),
    }
    expected = all_to_all_bytes(**columns)
    assert sum(sent) / len(sent) == expected
    # on GPUs a capacity of 1 sends as many rows as there are assignments, and no counts
    counts = 2 * 4 * 12 * (1 + (recompute != "none"))
    padded = {"capacity_limit": np.array(1.0), "is_cpu": np.array(0.0)}
    assert all_to_all_bytes(**columns | padded) == expected - counts


@pytest.mark.parametrize("backend", ["", "reference"], ids=["chunks", "all rows at once"])
def test_ranks_without_tokens_take_part(backend, pools):
    args = {
        "model": {**SMALL, **MODELS["mixtral"]},
        "plan": {"dp": 2, "ep": 2},
        "backend": backend,
    }
    for rank, result in enumerate(pools(2).call(f"{RANKS}:unevenly_routed", **args)):
        assert result["difference"] < 1e-6
        assert (result["largest_gradient"] > 0) == (rank == 0)


def test_fake_ranks_report_their_experts():
    plan = {"dp": 8, "ep": 2, "zero": 3, "dp_replicate": 2, "global_batch_size": 8}
    report = describe_fake_ranks(accept(spec("deepseek", plan)), 8)
    assert report["expert_mesh"] == {"expert_data": 4, "ep": 2}
    # 12 experts over ep 2, then sharded over 2 of the 4 ranks that hold the same experts
    assert report["rank_0_shards"]["blocks.1.mlp.experts.up.weight"] == [3, 24, 32]
    assert sum(rank["parameter_bytes"] for rank in report["ranks"]) == 2 * 4 * report["parameters"]


def test_ep_must_divide_the_ranks_of_a_model_copy():
    with pytest.raises(
        UserError,
        match=r"plan\.ep: .* dp_shard x cp = 2 ranks, ep 4 does not divide them\. .* ep 2",
    ):
        accept(spec("deepseek", {"dp": 4, "dp_replicate": 2, "zero": 3, "ep": 4}))
