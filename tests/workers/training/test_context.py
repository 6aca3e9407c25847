"""Context parallelism: decoders and runs on parts of sequences equal those on full sequences."""

from __future__ import annotations

import pytest

from tests.matrix import FULL
from tests.workers.training.conftest import final_weights, make_spec, relative

RANKS = "tests.workers.training.ring_ranks"
SMALL = {
    "name": "small",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 256,
    "max_seq_len": 64,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MOE = {"experts": 4, "top_k": 2, "expert_ffn": 24, "shared_experts": 1, "aux_loss": 0.1}
DYNAMIC = {"scaling": {"name": "dynamic", "factor": 2.0, "original_max_seq_len": 8}}
MODELS = {
    "grouped": {},
    "window": {"window": 7},
    "learned positions": {"position": "learned", "norm": "layernorm", "bias": "all"},
    "rope by the full length": {"rope": DYNAMIC},
    "mla": {"attention": "mla", "mla": MLA, "kv_heads": 4},
    "mfa": {"attention": "mfa", "mfa": {"qk_rank": 12, "head_dim": 16, "heads": 3}},
    "experts": {"moe": MOE},
    "capacity": {"moe": {**MOE, "capacity": 0.8}},
}


@pytest.mark.parametrize("model", MODELS)
def test_losses_gradients_and_routing_equal_full_sequences(pools, model):
    recompute = model in ("window", "capacity")
    for errors in pools(4).call(
        f"{RANKS}:decoder_errors", model={**SMALL, **MODELS[model]}, length=20, recompute=recompute
    ):
        assert errors["loss"] < 1e-6 and errors["routing"] < 1e-5, errors
        assert errors["gradients"] < 2e-6, errors


RUNS = [
    ("window", {"cp": 2, "recompute": "full"}),
    ("window", {"cp": 4}),
    ("window", {"cp": 2, "dp": 2, "zero": 1}),
    ("experts", {"cp": 2, "dp": 2, "zero": 2}),
]
# few with experts: one expert choice that flips by rounding breaks parity
STEPS = {"window": 20, "experts": 12} if FULL else {"window": 4, "experts": 4}


def run_spec(model, plan):
    steps = STEPS[model]
    # AdamW amplifies rounding where gradients are nearly zero: at a rate of 1e-3, weights differed
    # by 1e-4, losses by 1e-7
    optimizer = {"name": "adamw", "lr": 3e-4}
    # 20 positions are 5 for each of 4 ranks: chunks of 3 and 2
    return make_spec(
        {**SMALL, **MODELS[model]},
        {"micro_batch_size": 2, "global_batch_size": 8, **plan},
        steps=steps,
        seq_len=20,
        optimizer=optimizer,
        clip_norm=0.5,
        eval={"every_steps": steps // 2, "batches": 2},
        checkpoint={"every_steps": steps, "async": False},
    )


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    return {model: train(run_spec(model, {}), tmp_path_factory.mktemp(model)) for model in STEPS}


@pytest.mark.parametrize(("model", "plan"), RUNS, ids=[f"{model} {plan}" for model, plan in RUNS])
def test_runs_equal_one_process(model, plan, reference, train, tmp_path):
    result, one = train(run_spec(model, plan), tmp_path), reference[model]
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss", "moe/aux_loss", "moe/max_violation"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
    assert [point["tokens"] for point in result.points(1)] == [
        160 * step for step in range(1, STEPS[model] + 1)
    ]
    expected, actual = final_weights(one, STEPS[model]), final_weights(result, STEPS[model])
    assert max(relative(actual[name], expected[name]) for name in expected) <= 1e-4
