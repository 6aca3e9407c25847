"""Tensor and sequence parallelism on pools of ranks: parity with one process, bytes sent."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.planner.model.communication.collective_bytes import tp_call_bytes
from tests.matrix import FULL, select
from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.training.setup.fake_ranks import describe_fake_ranks
from workers.training.setup.spec_loading import accept

RANKS = "tests.workers.training.tensor_ranks"
BASE = {
    "name": "t",
    "layers": 2,
    "hidden": 36,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 10,
    "ffn": 84,
    "vocab": 255,
    "max_seq_len": 64,
}
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MOE = {"experts": 6, "top_k": 2, "expert_ffn": 20, "aux_loss": 0.5}
DEEPSEEK = {
    **MOE,
    "shared_experts": 1,
    "first_dense_layers": 1,
    "scoring": "sigmoid",
    "groups": 3,
    "groups_per_token": 2,
    "routed_scale": 2.5,
    "bias_update": 0.01,
}
MODELS = {
    "llama": {"tie_embeddings": True, "vocab": 257},
    "gpt": {
        "kv_heads": 4,
        "bias": "all",
        "norm": "layernorm",
        "position": "learned",
        "gated_mlp": False,
        "activation": "gelu",
        "tie_embeddings": True,
    },
    "qwen": {"kv_heads": 1, "bias": "qkv", "qk_norm": True, "logit_softcap": 30.0, "vocab": 5},
    "mistral": {
        "window": 5,
        "rope": {"scaling": {"name": "dynamic", "factor": 2.0}, "interleaved": True},
    },
    "mla": {"attention": "mla", "mla": MLA, "bias": "all", "norm": "layernorm"},
    "mla with plain queries": {
        "attention": "mla",
        "mla": {**MLA, "q_lora_rank": None},
        "tie_embeddings": True,
    },
    "mfa": {
        "attention": "mfa",
        "mfa": {"qk_rank": 18, "head_dim": 14, "heads": 4},
        "qk_norm": True,
        "bias": "qkv",
    },
    "mixtral": {"moe": MOE, "bias": "all"},
    "deepseek": {"attention": "mla", "mla": MLA, "moe": DEEPSEEK},
    "capacity": {
        "moe": {**MOE, "capacity": 1.0, "renormalise": False},
        "gated_mlp": False,
        "position": "none",
    },
}


@pytest.mark.parametrize(
    ("size", "sequence_parallel"), [(4, False), (2, True)], ids=["4 ranks", "2, tokens sharded"]
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_equal_the_unsharded_decoder(
    name, size, sequence_parallel, pools
):
    args = {"model": {**BASE, **MODELS[name]}, "sequence_parallel": sequence_parallel}
    for rank, errors in enumerate(pools(size).call(f"{RANKS}:decoder_errors", **args)):
        assert max(errors.values()) < 1e-5, (rank, errors)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("llama", False), ("qwen", False), ("mistral", True)]
)
def test_chunked_loss_equals_the_loss_of_sharded_logits(name, sequence_parallel, pools):
    """Covers tied weights, a logit cap with a rank that holds no vocabulary row, and sharded
    tokens.
    """
    size = 2 if sequence_parallel else 4
    args = {"model": {**BASE, **MODELS[name]}, "sequence_parallel": sequence_parallel}
    for rank, errors in enumerate(pools(size).call(f"{RANKS}:errors_without_logits", **args)):
        assert max(errors.values()) < 1e-5, (rank, errors)


def test_shard_shapes_of_each_rank(pools):
    model = {**BASE, "bias": "all", "kv_heads": 2, "moe": {**MOE, "first_dense_layers": 1}}
    shapes = [
        {name.removeprefix("blocks."): shape for name, shape in rank.items()}
        for rank in pools(4).call(f"{RANKS}:shard_shapes", model=model)
    ]
    assert [rank["embed.weight"] for rank in shapes] == [[64, 36]] * 3 + [[63, 36]]
    expected_shapes = {
        "0.attn.q.weight": [10, 36],
        "0.attn.q.bias": [10],
        "0.attn.o.weight": [36, 10],
        "0.attn.o.bias": [36],
        "0.attn.k.weight": [20, 36],  # two heads for four ranks: replicated
        "0.mlp.gate.weight": [21, 36],
        "0.mlp.down.weight": [36, 21],
        "1.mlp.router.weight": [6, 36],
        "1.mlp.experts.up.weight": [6, 5, 36],
        "1.mlp.experts.up.bias": [6, 5],
        "1.mlp.experts.down.weight": [6, 36, 5],
        "1.mlp.experts.down.bias": [6, 36],
    }
    for rank in shapes:
        assert {name: rank[name] for name in expected_shapes} == expected_shapes


def test_pipeline_parts_pass_sharded_tokens_on(pools):
    for shapes in pools(2).call(f"{RANKS}:part_shapes", model={**BASE, "tie_embeddings": True}):
        assert shapes == [[2, 6, 36], [2, 6, 36], [2, 12, 255]]


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    select(itertools.product(["gpt", "mla", "mfa", "deepseek"], [False, True]), [0, 3, 4, 7]),
)
def test_traffic_of_a_layer_equals_the_planners(name, sequence_parallel, pools):
    model = {**BASE, **MODELS[name], "hidden": 40}
    one, three = (
        pools(2).call(
            f"{RANKS}:collective_traffic",
            model={**model, "layers": layers},
            sequence_parallel=sequence_parallel,
        )
        for layers in (1, 3)
    )
    expected_bytes = tp_call_bytes(
        tp=2,
        accumulation=1,
        layers=2,
        pp=1,
        micro_batch=2,
        seq_len=12,
        cp=1,
        hidden=40,
        compute_bytes=4,
    )
    kinds = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
    calls = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    for few, many in zip(one, three, strict=True):
        sent = {kind: many["bytes"][kind] - few["bytes"][kind] for kind in few["bytes"]}
        assert {kind: size for kind, size in sent.items() if size} == dict.fromkeys(
            kinds, expected_bytes
        )
        more = {kind: count - few["calls"].get(kind, 0) for kind, count in many["calls"].items()}
        assert {kind: count for kind, count in more.items() if count} == {
            calls.get(kind, kind): 8 for kind in kinds
        }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab", [5, 64, 131])
def test_cross_entropy_over_a_sharded_vocabulary(vocab, size, pools):
    for rank in pools(size).call(f"{RANKS}:cross_entropy_errors", vocab=vocab, dtype="float32"):
        assert max(rank) < 1e-5
    for loss, gradient in pools(size).call(
        f"{RANKS}:cross_entropy_errors", vocab=vocab, dtype="bfloat16"
    ):
        assert loss < 1e-5 and gradient < 4e-3, "computed in fp32, the gradient rounded once"


def test_attention_dropout_differs_between_ranks(pools):
    (first, after, recomputed), (first_, after_, recomputed_) = pools(2).call(
        f"{RANKS}:random_draws"
    )
    assert first != first_ and after == after_
    assert (recomputed, recomputed_) == (first, first_), "recomputation draws the same numbers"


STEPS = 20 if FULL else 3
MOE_STEPS = 12 if FULL else 3  # few: one expert choice that flips by rounding breaks parity
RUNS = {
    # tp does not divide vocabulary, heads or MLP width, and dp does not divide their shards
    "llama": {
        "kv_heads": 1,
        "tie_embeddings": True,
        "vocab": 259,
        "ffn": 84,
        "hidden": 36,
        "head_dim": 10,
    },
    "deepseek": {
        "attention": "mla",
        "mla": MLA,
        "moe": {**DEEPSEEK, "expert_ffn": 12},
        "bias": "all",
        "vocab": 259,
    },
}
PLANS = [
    ("llama", {"tp": 2}),
    ("llama", {"tp": 4, "sequence_parallel": True, "recompute": "full"}),
    ("deepseek", {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True}),
]


def spec(name, plan, **train):
    steps = MOE_STEPS if "moe" in RUNS[name] else STEPS
    model = {**BASE, "name": name, "hidden": 32, "head_dim": 8, **RUNS[name]}
    plan = {"micro_batch_size": 2, "global_batch_size": 8, **plan}
    evaluation, schedule = {"every_steps": 3, "batches": 2}, {"name": "constant"}
    defaults = {"steps": steps, "clip_norm": 0.5, "eval": evaluation, "lr_schedule": schedule}
    # AdamW amplifies rounding where gradients are nearly zero
    defaults |= {
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "checkpoint": {"every_steps": steps, "async": False},
    }
    return make_spec(model, plan, **{**defaults, **train})


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    return {name: train(spec(name, {}), tmp_path_factory.mktemp(name)) for name in RUNS}


@pytest.mark.parametrize(
    ("name", "plan"),
    PLANS,
    ids=lambda case: (
        case if isinstance(case, str) else "-".join(f"{key[:4]}{case[key]}" for key in case)
    ),
)
def test_run_equals_one_process(name, plan, reference, train, tmp_path):
    result, one = train(spec(name, plan), tmp_path), reference[name]
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    for value in [
        "loss",
        "grad_norm",
        "val_loss",
        *(key for key in one.points()[0]["values"] if key[:4] == "moe/"),
    ]:
        for rank in range(len(result.outcomes)):
            assert result.values(value, rank) == pytest.approx(one.values(value), rel=1e-5), (
                value,
                rank,
            )
    expected, actual = (final_weights(run, len(one.points())) for run in (one, result))
    assert max(relative(actual[key], expected[key]) for key in expected) <= 1e-4


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 5e-3), ("fp16", 1e-3)])
def test_16_bit_run_equals_one_process(precision, tolerance, train, tmp_path):
    plan = {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True}
    more = {"loss_scale": {"initial": 1024.0}} if precision == "fp16" else {}
    plans = ({"precision": precision, **more}, {"precision": precision, **more, **plan})
    one, result = (
        train(spec("llama", plan, eval=None, steps=3), tmp_path / str(index))
        for index, plan in enumerate(plans)
    )
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(one.values("loss"), rel=tolerance)
    if precision == "fp16":
        assert result.values("loss_scale") == one.values("loss_scale")


@pytest.mark.parametrize("name", select(RUNS, [1]))
def test_resume_under_other_degrees(name, reference, train, tmp_path):
    """Saved under tp 2 with sequence parallel, resumed under sharded dp 2, then tp 2 x dp 2."""
    steps = len(reference[name].points())
    settings = {"checkpoint": {"every_steps": 100, "keep": 2}, "eval": None}
    plans = [
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2, "zero": 3},
        {"tp": 2, "dp": 2, "zero": 1},
    ]
    for attempt, plan in enumerate(plans, start=1):
        result = train(spec(name, plan, **settings, steps=steps * attempt // 3), tmp_path)
        assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(reference[name].values("loss"), rel=1e-5)


@pytest.mark.parametrize("zero", [0, 3])
def test_fake_ranks_report_the_shards(zero):
    run = accept(spec("llama", {"tp": 4, "dp": 2, "zero": zero, "sequence_parallel": True}))
    report = describe_fake_ranks(run, 8)
    shards = report["rank_0_shards"]
    share = 2 if zero else 1
    assert shards["blocks.0.attn.o.weight"] == [36 // share, 10]
    assert shards["blocks.0.mlp.down.weight"] == [36 // share, 21]
    assert shards["blocks.0.mlp.gate.weight"] == [11 if zero else 21, 36]
    assert shards["blocks.0.attn_norm.weight"] == [36 // share]
    assert shards["embed.weight"] == [33 if zero else 65, 36]
