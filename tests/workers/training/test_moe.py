"""Routed and latent shapes train alike under every plan: the auxiliary loss and the balancing bias
too.
"""

from __future__ import annotations

import pytest

from tests.workers.training.conftest import final_weights, make_spec, relative

STEPS = 4  # few: a choice of experts that flips by a last bit would end parity
BATCH = 8
MOE = {"experts": 6, "top_k": 2, "expert_ffn": 24}
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
CASES = {
    "mixtral": {"moe": {**MOE, "aux_loss": 0.5}},
    "deepseek-v3": {
        "attention": "mla",
        "mla": MLA,
        "moe": {
            **MOE,
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
    "capacity": {
        "moe": {**MOE, "capacity": 1.0, "aux_loss": 0.1, "renormalise": False},
        "bias": "all",
    },
    "mfa": {
        "attention": "mfa",
        "mfa": {"qk_rank": 16, "head_dim": 16, "heads": 4},
        "qk_norm": True,
    },
}


def spec(case, plan, **more):
    model = {
        "name": case,
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "ffn": 80,
        "vocab": 256,
        "max_seq_len": 64,
        **CASES[case],
    }
    plan = {"micro_batch_size": 2, "global_batch_size": BATCH, **plan}
    settings = {"steps": STEPS, "clip_norm": 0.5, "eval": {"every_steps": 2, "batches": 2}}
    # AdamW blows up rounding where gradients are all but zero
    settings |= {
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "checkpoint": {"every_steps": STEPS, "async": False},
    }
    return make_spec(model, plan, **(settings | more))


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return {case: train(spec(case, {}), tmp_path_factory.mktemp(case)) for case in CASES}


PLANS = [{"dp": 2, "zero": 0, "micro_batch_size": 4}, {"dp": 2, "zero": 3, "recompute": "full"}]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS, ids=["ddp", "zero3-recomputed"])
def test_numbers_of_one_process(plan, case, alone, train, tmp_path):
    result = train(spec(case, plan), tmp_path)
    assert [outcome["class"] for outcome in result.outcomes] == ["ok", "ok"], result.outcomes
    names = [name for name in alone[case].points()[0]["values"] if name.startswith("moe/")]
    assert bool(names) == ("moe" in CASES[case])
    for name in ["loss", "grad_norm", "val_loss", *names]:
        assert result.values(name) == pytest.approx(alone[case].values(name), rel=1e-5), name
        assert result.values(name, 1) == result.values(name), name
    theirs, ours = final_weights(alone[case], STEPS), final_weights(result, STEPS)
    assert max(relative(ours[name], theirs[name]) for name in theirs) <= 1e-4


def test_the_bias_is_stored_in_checkpoints(alone, train, tmp_path):
    first = spec("deepseek-v3", {}, steps=2, checkpoint={"every_steps": 2})
    train(first, tmp_path)
    train(spec("deepseek-v3", {"dp": 2, "zero": 3}, checkpoint={"every_steps": 2}), tmp_path)
    resumed = [
        point["values"]["loss"] for point in train(spec("deepseek-v3", {}), tmp_path).points()
    ]
    assert resumed == pytest.approx(alone["deepseek-v3"].values("loss"), rel=1e-5)


@pytest.mark.parametrize(("precision", "zero"), [("bf16", 3), ("fp16", 0)])
def test_in_half_precision(precision, zero, alone, train, tmp_path):
    plan = {"dp": 2, "zero": zero, "precision": precision}
    result = train(spec("deepseek-v3", plan, steps=4, eval=None), tmp_path)
    assert [outcome["class"] for outcome in result.outcomes] == ["ok", "ok"], result.outcomes
    assert result.values("loss") == pytest.approx(alone["deepseek-v3"].values("loss")[:4], rel=5e-3)
