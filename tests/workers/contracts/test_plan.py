"""Which plans are legal, and that a refusal names the field, the numbers and something that works."""

# ruff: noqa: E501
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.contracts import ModelSpec, ParallelPlan, plan_problems
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.plan import LossScale

LLAMA = preset("llama3-8b")
MOE = preset("qwen3-30b-a3b")
GPT2 = preset("gpt2-124m")


def refused(
    model: ModelSpec = LLAMA,
    seq_len: int | None = None,
    devices: int | None = None,
    **fields: object,
) -> list[str]:
    """The fields refused, each with its sentence."""
    plan = ParallelPlan.from_dict(fields)
    return [
        f"{item.field}: {item.message} -> {item.hint.removeprefix('Use ').removesuffix('.')}"
        for item in plan_problems(plan, model=model, seq_len=seq_len, devices=devices)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 8, "zero": 3, "recompute": "selective", "precision": "bf16", "micro_batch_size": 2},
        {"pp": 3, "global_batch_size": 8},  # 32 layers over 3 stages
        {"pp": 4, "global_batch_size": 2},  # fewer micro-batches than stages
        {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "global_batch_size": 4, "zero": 2},
        {"pp": 2, "schedule": "dualpipev", "global_batch_size": 4},
        {
            "pp": 4,
            "schedule": "interleaved_1f1b",
            "virtual_stages": 4,
            "global_batch_size": 10,
        },
        {
            "pp": 2,
            "schedule": "interleaved_1f1b",
            "global_batch_size": 4,
            "zero": 3,
            "dp": 2,
        },
        {
            "pp": 2,
            "schedule": "pipedream",
            "weight_stashing": True,
            "vertical_sync": True,
            "global_batch_size": 4,
        },
        {"tp": 16},  # key-value heads repeated twice
        {"dp": 4, "dp_replicate": 2, "zero": 3},
        {"pp": 2, "stage_layers": [15, 17]},
        {"recompute": "auto", "recompute_budget_bytes": 10**9},
    ],
)
def test_legal(fields: dict[str, object]) -> None:
    assert refused(**fields) == []


def test_numbers_as_text_are_counted_as_numbers() -> None:
    plan = ParallelPlan.from_dict({"dp": "8", "micro_batch_size": 2.0})
    assert (plan.dp, plan.global_batch_size, plan.world_size) == (8, 16, 8)
    sizes = {"layers": 2, "hidden": "64", "heads": "4", "ffn": 128, "vocab": 256, "max_seq_len": 64}
    assert ModelSpec.from_dict(sizes) == ModelSpec.from_dict({**sizes, "hidden": 64, "heads": 4})
    for wrong in ({"dp": "eight"}, {"dp": 2.5}, {"micro_batch_size": [1]}, {"dp": True}):
        with pytest.raises(ValueError, match=r"dp|micro_batch_size"):
            ParallelPlan.from_dict(wrong)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"dp": 4, "micro_batch_size": 2, "global_batch_size": 20},
            "plan.global_batch_size: 20 sequences do not divide by micro_batch_size 2 x dp 4 = 8 "
            "-> 16 or 24",
        ),
        ({"dp": 4, "dp_replicate": 3}, "plan.dp_replicate: 3 copies do not divide dp 4 -> 2"),
        ({"tp": 3}, "plan.tp: 32 heads do not divide by tp 3 -> tp 2"),
        ({"ep": 2, "dp": 2}, "plan.ep: llama3-8b has no experts to distribute over ep 2 -> ep 1"),
        (
            {"pp": 2, "schedule": "zbv", "virtual_stages": 1},
            "plan.virtual_stages: zbv requires 2 stages per device, virtual_stages is 1 -> 2",
        ),
        (
            {"pp": 2, "schedule": "zb1p", "virtual_stages": 1},
            "plan.virtual_stages: zb1p requires at least 2 stages per device, virtual_stages is 1 -> 2",
        ),
        (
            {"pp": 2, "virtual_stages": 2},
            "plan.virtual_stages: 1f1b has one stage per device, virtual_stages is 2 -> 1, or "
            "schedule interleaved_1f1b",
        ),
        (
            {"pp": 4, "schedule": "dualpipev", "global_batch_size": 7},
            "plan.global_batch_size: dualpipev requires at least 2 x pp = 8 micro-batches, there are "
            "7 -> 8, or schedule zbv",
        ),
        (
            {"pp": 2, "schedule": "zb1p", "global_batch_size": 5},
            "plan.global_batch_size: zb1p runs micro-batches in equal rounds of about pp 2, 5 do "
            "not divide evenly -> 4 or 6",
        ),
        (
            {"pp": 2, "schedule": "zbv", "zero": 3, "dp": 2},
            "plan.zero: zbv splits the backward pass, and resharding between its halves loses "
            "weight gradients -> 2, or schedule interleaved_1f1b",
        ),
        (
            {"pp": 2, "schedule": "pipedream", "zero": 1, "dp": 2},
            "plan.zero: pipedream stores several versions of all weights, ZeRO shards them -> 0",
        ),
        (
            {"weight_stashing": True},
            "plan.weight_stashing: weight_stashing belongs to schedule pipedream, schedule is "
            "1f1b -> schedule pipedream",
        ),
        ({"pp": 64}, "plan.pp: 32 layers are too few for pp 64 x virtual_stages 1 stages -> pp 32"),
        (
            {"pp": 2, "stage_layers": [15, 16]},
            "plan.stage_layers: the entries add up to 31 layers, llama3-8b has 32 -> [16, 16]",
        ),
        (
            {"pp": 2, "stage_layers": [32]},
            "plan.stage_layers: 1 entries for 2 stages (pp 2 x virtual_stages 1) -> [16, 16]",
        ),
        (
            {"recompute": "full", "recompute_budget_bytes": 1},
            "plan.recompute_budget_bytes: a budget applies to recompute auto only, recompute is full -> "
            "recompute auto, or omit the budget",
        ),
    ],
)
def test_refused_with_numbers_and_a_way_out(fields: dict[str, object], sentence: str) -> None:
    assert refused(**fields)[0] == sentence


def test_against_devices_and_sequence() -> None:
    assert refused(dp=2, tp=2, devices=8) == [
        "plan.dp: dp 2 x tp 2 x pp 1 x cp 1 is 4 devices, not 8 -> dp 4"
    ]
    assert refused(cp=3, seq_len=1024) == [
        "plan.cp: a sequence of 1024 tokens does not divide by cp 3 -> cp 2"
    ]
    assert refused(tp=4, sequence_parallel=True, seq_len=1022)[0].endswith(
        "a sequence length of 1020 or 1024"
    )
    assert refused(model=GPT2, seq_len=2048) == [
        "seq_len: 2048 tokens exceed the 1024 learned positions of gpt2-124m -> 1024"
    ]
    assert refused(seq_len=65536) == []  # rotary positions have no table


def test_experts() -> None:
    assert refused(model=MOE, dp=4, ep=4) == []
    assert refused(model=MOE, dp=4, ep=8) == ["plan.ep: ep 8 does not divide dp x cp = 4 -> ep 4"]
    assert refused(model=MOE, dp=3, ep=3) == ["plan.ep: 128 experts do not divide by ep 3 -> ep 2"]


@given(
    dp=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 4),
    cp=st.sampled_from([1, 2]),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 8),
    zero=st.integers(0, 3),
)
def test_degrees_multiply_and_the_batch_comes_apart_again(
    dp: int, tp: int, pp: int, cp: int, micro: int, accumulation: int, zero: int
) -> None:
    plan = ParallelPlan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero=zero,
        micro_batch_size=micro,
        global_batch_size=micro * dp * accumulation,
        loss_scale=LossScale(),
    )
    assert plan.world_size == dp * tp * pp * cp
    assert plan.accumulation == accumulation
    assert sum(plan.layers_of_stages(32)) == 32
    assert plan_problems(plan, model=LLAMA, seq_len=4096, devices=plan.world_size) == []
    assert ParallelPlan.model_validate_json(plan.to_json()) == plan
