"""Combined techniques on four ranks equal one process: losses, gradient norms and final weights.

Combinations that need eight ranks are in `test_eight_ranks`.
"""

from __future__ import annotations

import pytest

from tests.matrix import FULL, select
from tests.workers.training.conftest import final_weights, make_spec, relative

STEPS = 20
MOE_STEPS = 12  # few: one expert choice that flips by rounding breaks parity
MAX_STEPS = STEPS if FULL else 3  # of the tests; benchmarks take all steps

DENSE = {
    "name": "dense",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 88,
    "vocab": 257,
}
# for plans without pipelines; tp and then dp do not divide vocabulary, heads and MLP width
FLAT = {
    "name": "flat",
    "layers": 2,
    "hidden": 36,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 10,
    "ffn": 84,
    "vocab": 259,
    "tie_embeddings": True,
}
GPT = {
    "name": "gpt",
    "layers": 4,
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
MLA = {
    "name": "mla",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn": 80,
    "vocab": 256,
    "attention": "mla",
    "mla": {
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}
MOE = {
    "name": "moe",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "vocab": 256,
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 40, "shared_experts": 1, "aux_loss": 0.01},
}

COMBINATIONS = [
    (DENSE, {"dp": 2, "pp": 2, "zero": 0, "schedule": "gpipe"}, {}),
    (DENSE, {"dp": 2, "pp": 2, "zero": 2, "schedule": "zbv"}, {}),
    (DENSE, {"tp": 2, "pp": 2, "schedule": "zb1p", "sequence_parallel": True}, {}),
    (FLAT, {"tp": 2, "dp": 2, "zero": 0}, {}),
    (GPT, {"tp": 2, "dp": 2, "zero": 2}, {}),
    (FLAT, {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}, {}),
    (GPT, {"dp": 2, "pp": 2, "zero": 3, "schedule": "interleaved_1f1b"}, {}),
    (FLAT, {"cp": 2, "tp": 2}, {}),
    (GPT, {"cp": 2, "dp": 2, "zero": 3}, {}),
    (DENSE, {"cp": 2, "pp": 2, "schedule": "dualpipev"}, {}),
    (MLA, {"tp": 2, "cp": 2, "recompute": "selective"}, {}),
    (FLAT, {"dp": 4, "dp_replicate": 2, "zero": 3, "recompute": "selective"}, {}),
    (FLAT, {"tp": 2, "dp": 2, "zero": 1}, {"optimizer": {"name": "muon", "lr": 1e-3}}),
    (MOE, {"tp": 2, "dp": 2, "zero": 2}, {"steps": MOE_STEPS}),
    (MOE, {"dp": 2, "pp": 2, "zero": 1, "schedule": "1f1b"}, {"steps": MOE_STEPS}),
]


def spec(model, plan, *, steps=STEPS, **train):
    plan = {"global_batch_size": 4, **plan}
    settings = {"seq_len": 16, "clip_norm": 0.5, "eval": {"every_steps": steps, "batches": 1}}
    settings["optimizer"] = {"name": "adamw", "lr": 3e-4}  # a higher rate amplifies rounding
    checkpoint = {"every_steps": steps, "async": False}
    return make_spec(
        model | {"max_seq_len": 64}, plan, steps=steps, checkpoint=checkpoint, **(settings | train)
    )


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    """`reference(model, train)`: the run in one process, trained once."""
    runs = {}

    def run(model, more):
        key = f"{model['name']} {more}"
        if key not in runs:
            runs[key] = train(spec(model, {}, **more), tmp_path_factory.mktemp("reference"))
        return runs[key]

    return run


# without combinations whose pairs of techniques the others, and test_expert, contain
SELECTED = [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("model", "plan", "more"),
    select(
        [pytest.param(m, p, t, id=f"{m['name']} {p} {t or ''}") for m, p, t in COMBINATIONS],
        SELECTED,
    ),
)
def test_equal_to_one_process(model, plan, more, reference, train, tmp_path):
    steps = min(more.get("steps", STEPS), MAX_STEPS)
    more = {**more, "steps": steps}
    result, one = train(spec(model, plan, **more), tmp_path), reference(model, more)
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for name in ("loss", "grad_norm", "val_loss"):
        assert result.values(name) == pytest.approx(one.values(name), rel=1e-5), name
        assert all(result.values(name, rank) == result.values(name) for rank in range(4)), name
    expected, actual = final_weights(one, steps), final_weights(result, steps)
    # without rotation, a bias of keys does not change softmax: its gradient is only rounding error,
    # which Adam amplifies
    ignored = {
        name
        for name in expected
        if model.get("position") == "learned" and name.endswith("attn.k.bias")
    }
    assert max(relative(actual[name], expected[name]) for name in expected.keys() - ignored) <= 1e-4
