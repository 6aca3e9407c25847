"""Tensor and sequence parallelism on pools of ranks: the plain decoder's logits, losses and
gradients, one process's
runs, and the messages that the planner counts."""

from __future__ import annotations

import pytest

from orchestrator.planner.model.communication.engine_traffic import tp_call_bytes
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
def test_logits_losses_and_gradients_of_the_plain_decoder(name, size, sequence_parallel, pools):
    given = {"model": {**BASE, **MODELS[name]}, "sequence_parallel": sequence_parallel}
    for rank, errors in enumerate(pools(size).call(f"{RANKS}:decoder_errors", **given)):
        assert max(errors.values()) < 1e-5, (rank, errors)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("llama", False), ("qwen", False), ("mistral", True)]
)
def test_losses_without_logits_are_those_of_sharded_ones(name, sequence_parallel, pools):
    """Tied, and with a cap, a vocabulary of which one rank of four holds nothing, and tokens over
    the ranks.
    """
    size = 2 if sequence_parallel else 4
    given = {"model": {**BASE, **MODELS[name]}, "sequence_parallel": sequence_parallel}
    for rank, errors in enumerate(pools(size).call(f"{RANKS}:errors_without_logits", **given)):
        assert max(errors.values()) < 1e-5, (rank, errors)


def test_what_a_rank_holds(pools):
    model = {**BASE, "bias": "all", "kv_heads": 2, "moe": {**MOE, "first_dense_layers": 1}}
    shapes = [
        {name.removeprefix("blocks."): shape for name, shape in rank.items()}
        for rank in pools(4).call(f"{RANKS}:held_shapes", model=model)
    ]
    assert [rank["embed.weight"] for rank in shapes] == [[64, 36]] * 3 + [[63, 36]]
    held = {
        "0.attn.q.weight": [10, 36],
        "0.attn.q.bias": [10],
        "0.attn.o.weight": [36, 10],
        "0.attn.o.bias": [36],
        "0.attn.k.weight": [20, 36],  # two heads for four ranks: whole
        "0.mlp.gate.weight": [21, 36],
        "0.mlp.down.weight": [36, 21],
        "1.mlp.router.weight": [6, 36],
        "1.mlp.experts.up.weight": [6, 5, 36],
        "1.mlp.experts.up.bias": [6, 5],
        "1.mlp.experts.down.weight": [6, 36, 5],
        "1.mlp.experts.down.bias": [6, 36],
    }
    for rank in shapes:
        assert {name: rank[name] for name in held} == held


def test_parts_of_a_pipeline_hand_on_their_tokens(pools):
    for shapes in pools(2).call(f"{RANKS}:part_shapes", model={**BASE, "tie_embeddings": True}):
        assert shapes == [[2, 6, 36], [2, 6, 36], [2, 12, 255]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt", "mla", "mfa", "deepseek"])
def test_messages_of_a_layer_are_those_of_the_planner(name, sequence_parallel, pools):
    model = {**BASE, **MODELS[name], "hidden": 40}
    one, three = (
        pools(2).call(
            f"{RANKS}:messages",
            model={**model, "layers": layers},
            sequence_parallel=sequence_parallel,
        )
        for layers in (1, 3)
    )
    message = tp_call_bytes(
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
        bytes_ = {kind: many["bytes"][kind] - few["bytes"][kind] for kind in few["bytes"]}
        assert {kind: size for kind, size in bytes_.items() if size} == dict.fromkeys(
            kinds, message
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


def test_attention_drops_other_places_on_every_rank(pools):
    (first, after, again), (first_, after_, again_) = pools(2).call(f"{RANKS}:drawn")
    assert first != first_ and after == after_
    assert (again, again_) == (first, first_), "the same ones when recomputed"


STEPS = 20
RUNS = {
    # nothing divides: rows of the vocabulary, head and MLP widths over tp, and what is left of them
    # over dp
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
    # a choice of experts that flips by a last bit would end parity
    steps = 12 if "moe" in RUNS[name] else STEPS
    model = {**BASE, "name": name, "hidden": 32, "head_dim": 8, **RUNS[name]}
    plan = {"micro_batch_size": 2, "global_batch_size": 8, **plan}
    evaluation, schedule = {"every_steps": 6, "batches": 2}, {"name": "constant"}
    defaults = {"steps": steps, "clip_norm": 0.5, "eval": evaluation, "lr_schedule": schedule}
    # AdamW blows up rounding where gradients are all but zero
    defaults |= {
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "checkpoint": {"every_steps": steps, "async": False},
    }
    return make_spec(model, plan, **{**defaults, **train})


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return {name: train(spec(name, {}), tmp_path_factory.mktemp(name)) for name in RUNS}


@pytest.mark.parametrize(
    ("name", "plan"),
    PLANS,
    ids=lambda given: (
        given if isinstance(given, str) else "-".join(f"{key[:4]}{given[key]}" for key in given)
    ),
)
def test_a_run_is_that_of_one_process(name, plan, alone, train, tmp_path):
    result, one = train(spec(name, plan), tmp_path), alone[name]
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
    theirs, ours = (final_weights(each, len(one.points())) for each in (one, result))
    assert max(relative(ours[each], theirs[each]) for each in theirs) <= 1e-4


@pytest.mark.parametrize(("precision", "near"), [("bf16", 5e-3), ("fp16", 1e-3)])
def test_16_bits_as_one_process_computes_them(precision, near, train, tmp_path):
    plan = {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True}
    more = {"loss_scale": {"initial": 1024.0}} if precision == "fp16" else {}
    plans = ({"precision": precision, **more}, {"precision": precision, **more, **plan})
    one, laid = (
        train(spec("llama", plan, eval=None, steps=4), tmp_path / str(place))
        for place, plan in enumerate(plans)
    )
    assert {outcome["class"] for outcome in laid.outcomes} == {"ok"}, laid.outcomes
    assert laid.values("loss") == pytest.approx(one.values("loss"), rel=near)
    if precision == "fp16":
        assert laid.values("loss_scale") == one.values("loss_scale")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_under_another_degree_and_back(name, alone, train, tmp_path):
    """Saved under tp 2 with sequence parallel, resumed under sharded dp 2, then tp 2 x dp 2."""
    steps, keep = (
        len(alone[name].points()),
        {"checkpoint": {"every_steps": 100, "keep": 2}, "eval": None},
    )
    plans = [
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2, "zero": 3},
        {"tp": 2, "dp": 2, "zero": 1},
    ]
    for part, plan in enumerate(plans, start=1):
        result = train(spec(name, plan, **keep, steps=steps * part // 3), tmp_path)
        assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    assert result.values("loss") == pytest.approx(alone[name].values("loss"), rel=1e-5)


@pytest.mark.parametrize("zero", [0, 3])
def test_fake_ranks_show_the_shards(zero):
    run = accept(spec("llama", {"tp": 4, "dp": 2, "zero": zero, "sequence_parallel": True}))
    told = describe_fake_ranks(run, 8)
    shards = told["rank_0_shards"]
    share = 2 if zero else 1
    assert shards["blocks.0.attn.o.weight"] == [36 // share, 10]
    assert shards["blocks.0.mlp.down.weight"] == [36 // share, 21]
    assert shards["blocks.0.mlp.gate.weight"] == [11 if zero else 21, 36]
    assert shards["blocks.0.attn_norm.weight"] == [36 // share]
    assert shards["embed.weight"] == [33 if zero else 65, 36]
