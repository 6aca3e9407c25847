"""Enumeration: exactly the plans that the contract accepts, as columns."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from orchestrator.planner.model.columns.codes import SCHEDULE
from orchestrator.planner.model.inputs import plan_columns
from orchestrator.planner.search.axes import build_axes
from orchestrator.planner.search.enumeration import enumerate_plans
from orchestrator.planner.search.grid import constant_plan, plan_of
from orchestrator.planner.search.legality_masks import illegal
from workers.contracts.base import Refused
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan

ODD = ModelSpec(
    layers=7,
    hidden=96,
    heads=12,
    kv_heads=6,
    ffn=260,
    vocab=1000,
    max_seq_len=64,
    position="learned",
)
MODELS = [
    preset(name)
    for name in ("gpt2-124m", "llama3-8b", "mixtral-8x7b", "deepseek-v2", "qwen3-30b-a3b")
] + [ODD]
SMALL = ClusterSpec(device="h100-80g", nodes=2, devices_per_node=4)


def random_plan(draw: random.Random) -> ParallelPlan:
    few, more = [1, 1, 2, 3, 4], [1, 1, 1, 2, 4, 5, 6, 8, 12]
    schedule = draw.choice(list(SCHEDULE))
    recompute = draw.choice(["none", "selective", "full", "auto"])
    fields = {
        "dp": draw.choice(more),
        "tp": draw.choice(more),
        "pp": draw.choice(few),
        "cp": draw.choice(few),
        "ep": draw.choice(more),
        "zero": draw.choice([0, 0, 1, 2, 3]),
        "sequence_parallel": draw.random() < 0.5,
        "recompute": recompute,
        "schedule": schedule,
        "micro_batch_size": draw.choice(few),
        "virtual_stages": draw.choice([1, 2, 2, 3]) if draw.random() < 0.5 else None,
        "global_batch_size": draw.choice([None, 1, 8, 24, 48, 96, 100, 480]),
        "dp_replicate": draw.choice([None, None, 1, 2, 3]),
    }
    if draw.random() < 0.1:
        fields[draw.choice(["weight_stashing", "vertical_sync"])] = draw.random() < 0.7
    if draw.random() < 0.1:
        fields["recompute_budget_bytes"] = 2**30
    if draw.random() < 0.2:
        fields["stage_layers"] = [draw.choice([6, 7, 8, 12]) for _ in range(draw.choice([1, 2, 4]))]
    return ParallelPlan.from_dict(fields)


def columns_of(plans: list[ParallelPlan]) -> dict[str, np.ndarray]:
    names = {
        name: name
        for name in ("dp", "tp", "pp", "cp", "ep", "zero", "sequence_parallel", "virtual_stages")
    }
    names |= {"micro_batch": "micro_batch_size", "global_batch": "global_batch_size"}
    columns = {
        name: np.array([int(getattr(plan, field)) for plan in plans])
        for name, field in names.items()
    }
    return columns | {
        "schedule": np.array([SCHEDULE[plan.schedule] for plan in plans]),
        "dp_replicate": np.array([plan.dp_replicate or 0 for plan in plans]),
        "weight_stashing": np.array([int(bool(plan.weight_stashing)) for plan in plans]),
        "vertical_sync": np.array([int(bool(plan.vertical_sync)) for plan in plans]),
        "budget_without_auto": np.array(
            [
                int(plan.recompute_budget_bytes is not None and plan.recompute != "auto")
                for plan in plans
            ]
        ),
        "stage_entries": np.array(
            [-1 if plan.stage_layers is None else len(plan.stage_layers) for plan in plans]
        ),
        "stage_sum": np.array(
            [-1 if plan.stage_layers is None else sum(plan.stage_layers) for plan in plans]
        ),
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_masks_agree_with_the_contract(model: ModelSpec) -> None:
    draw = random.Random(model.name)
    plans = [random_plan(draw) for _ in range(3000)]
    seq_len, devices = draw.choice([64, 96, 100, 128]), draw.choice([None, 8, 48])
    problems = [
        plan_problems(plan, model=model, seq_len=seq_len, devices=devices, field="")
        for plan in plans
    ]
    reasons = illegal(columns_of(plans), model=model, seq_len=seq_len, devices=devices)
    left_out = np.zeros(len(plans), bool)
    for reason, mask in reasons.items():
        left_out |= mask
        # a reason names the field that the contract names
        assert all(
            reason.partition(":")[0] in {each.field for each in problems[at]}
            for at in np.flatnonzero(mask)
        )
    assert left_out.tolist() == [bool(each) for each in problems]


def legal_cells(block) -> list[int]:
    mask = (
        np.ones(block.shape, bool)
        if block.legal is None
        else np.broadcast_to(block.legal, block.shape)
    )
    assert int(mask.sum()) == block.size
    return np.flatnonzero(mask).tolist()


def cells(space, chosen, batch):
    for block in space.blocks:
        for index in legal_cells(block):
            fields = block.fields(index)
            yield block, index, plan_of(fields, batch, chosen)


def test_a_small_space_holds_every_legal_plan_once() -> None:
    model, seq_len, batch = preset("mixtral-8x7b"), 32, 8
    chosen = build_axes(
        {"offload": ["none", "all"], "prefetch_layers": [None, 2], "recompute": ["none", "full"]},
        SMALL,
        SMALL.entry,
    )
    space = enumerate_plans(model, SMALL, seq_len, batch, chosen)
    result = [plan.to_json() for _, _, plan in cells(space, chosen, batch)]
    degrees = [1, 2, 4, 8]
    expected = set()
    for dp, tp, pp, cp in itertools.product(degrees, [1, 2, 4], degrees, degrees):
        if dp * tp * pp * cp != 8 or batch % dp:
            continue
        for ep, zero, schedule, virtual, micro, copies, sequence in itertools.product(
            degrees, range(4), SCHEDULE, [1, 2, 4, 8], [1, 2, 4, 8], [None, 2, 4], [False, True]
        ):
            useless = (
                (sequence and tp == 1)
                or (zero and dp * cp == 1)
                or (copies and (not zero or copies == dp))
                or (pp == 1 and schedule != "1f1b")
            )
            if useless or (dp % (micro and 1)) or micro * dp > batch:
                continue
            fields = {
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "zero": zero,
                "schedule": schedule,
                "virtual_stages": virtual,
                "micro_batch_size": micro,
                "global_batch_size": batch,
                "dp_replicate": copies,
                "sequence_parallel": sequence,
                "precision": "bf16",
            }
            if plan_problems(
                ParallelPlan.from_dict(fields), model=model, seq_len=seq_len, devices=8
            ):
                continue
            for offload, recompute, ahead in itertools.product(
                ["none", "all"], ["none", "full"], [None, 2]
            ):
                if ahead is None or zero == 3:
                    more = {"offload": offload, "recompute": recompute, "prefetch_layers": ahead}
                    expected.add(ParallelPlan.from_dict({**fields, **more}).to_json())
    assert len(result) == space.size == len(set(result))
    assert set(result) == expected


def test_columns_of_a_block_match_its_plans() -> None:
    model, seq_len, batch = preset("deepseek-v2"), 4096, 96
    cluster = ClusterSpec(device="h100-80g", nodes=4, devices_per_node=8)
    chosen = build_axes({"precision": ["bf16", "fp8"], "devices": "any"}, cluster, cluster.entry)
    space = enumerate_plans(model, cluster, seq_len, batch, chosen)
    draw = random.Random(1)
    for block in space.blocks:
        columns = block.columns(constant_plan(batch, chosen), seq_len)
        for index in draw.sample(legal_cells(block), min(20, block.size)):
            fields = block.fields(index)
            plan = plan_of(fields, batch, chosen)
            devices = fields["nodes"] * fields["devices_per_node"]
            assert not plan_problems(plan, model=model, seq_len=seq_len, devices=devices)
            for name, value in plan_columns(plan, seq_len).items():
                assert np.broadcast_to(columns[name], block.shape).reshape(-1)[index] == value, name


def test_fixed_fields_hold_and_others_vary() -> None:
    fix = {"tp": 4, "zero": [1, 2], "schedule": "zbv", "pp": 2, "reduce_dtype": "fp32"}
    chosen = build_axes(fix, SMALL, SMALL.entry)
    space = enumerate_plans(preset("llama3-8b"), SMALL, 4096, 16, chosen)
    plans = [plan for _, _, plan in cells(space, chosen, 16)]
    # one data-parallel rank has nothing to shard, but zero is fixed
    assert {
        (plan.tp, plan.pp, plan.schedule, plan.virtual_stages, plan.reduce_dtype) for plan in plans
    } == {(4, 2, "zbv", 2, "fp32")}
    assert {plan.zero for plan in plans} == {1, 2}
    assert {plan.recompute for plan in plans} == {"none", "selective", "full"}


def test_many_choices_per_row() -> None:
    fix = {
        "prefetch_layers": list(range(80)),
        "pp": 2,
        "offload": "none",
        "recompute": "none",
        "zero": [0, 3],
    }
    chosen = build_axes(fix, SMALL, SMALL.entry)
    space = enumerate_plans(preset("llama3-8b"), SMALL, 4096, 2, chosen)
    plans = [plan for _, _, plan in cells(space, chosen, 2)]
    assert space.size == len(plans) == len({plan.to_json() for plan in plans})
    assert {plan.prefetch_layers for plan in plans} == {None, *range(80)}
    assert not any(
        plan_problems(plan, model=preset("llama3-8b"), seq_len=4096, devices=8) for plan in plans
    )


def test_tensor_parallelism_stays_within_a_node_by_default() -> None:
    model = preset("llama3-70b")
    free = build_axes({}, SMALL, SMALL.entry)
    space = enumerate_plans(model, SMALL, 4096, 16, free)
    assert max(int(block.rows["tp"].max()) for block in space.blocks) == 4
    assert space.rejected["tp: spans nodes; fix tp to include it"] > 0
    requested = build_axes({"tp": 8}, SMALL, SMALL.entry)
    assert enumerate_plans(model, SMALL, 4096, 16, requested).size > 0


@pytest.mark.parametrize(
    ("fix", "field"),
    [
        ({"tpp": 2}, "fix.tpp"),
        ({"tp": 0}, "fix.tp"),
        ({"tp": "many"}, "fix.tp"),
        ({"zero": 4}, "fix.zero"),
        ({"zero": []}, "fix.zero"),
        ({"schedule": "2f2b"}, "fix.schedule"),
        ({"devices": "some"}, "fix.devices"),
        ({"devices": 7}, "fix.devices"),
        ({"pp": -2}, "fix.pp"),
        ({"micro_batch_size": 1.5}, "fix.micro_batch_size"),
    ],
)
def test_an_invalid_fix_is_refused_by_field(fix: dict[str, object], field: str) -> None:
    with pytest.raises(Refused) as refused:
        enumerate_plans(preset("llama3-8b"), SMALL, 4096, 16, build_axes(fix, SMALL, SMALL.entry))
    assert refused.value.field == field
    assert refused.value.message and refused.value.hint


def test_a_cluster_of_a_million_devices_is_answered() -> None:
    cluster = ClusterSpec(device="h100-80g", nodes=65536, devices_per_node=16)
    space = enumerate_plans(
        preset("gpt3-175b"), cluster, 2048, 1536, build_axes({}, cluster, cluster.entry)
    )
    assert 0 < space.size <= 5_000_000
    assert space.rejected["global_batch_size: does not divide by micro_batch_size x dp"] > 0


def test_a_large_search_is_restricted_with_a_note_or_refused() -> None:
    cluster = ClusterSpec(device="h800-80g", nodes=256, devices_per_node=8)
    free = build_axes({}, cluster, cluster.entry)
    space = enumerate_plans(preset("deepseek-v3"), cluster, 4096, 15360, free)
    assert 10**6 <= space.size <= 5 * 10**6
    assert "hybrid sharding" in space.notes[0] and "Fix an axis" in space.notes[0]
    assert any("excluded to limit the search" in reason for reason in space.rejected)
    giant = ClusterSpec(device="h800-80g", nodes=55440, devices_per_node=720)
    with pytest.raises(Refused) as refused:
        enumerate_plans(preset("deepseek-v3"), giant, 55440, 698_377_680, free)
    assert refused.value.field.startswith("fix.")
    assert "the limit is" in refused.value.message and refused.value.hint.startswith("Fix ")


def test_a_million_legal_plans_of_gpt3_on_512_devices() -> None:
    cluster = ClusterSpec(device="h100-80g", nodes=64, devices_per_node=8)
    space = enumerate_plans(
        preset("gpt3-175b"), cluster, 2048, 1536, build_axes({}, cluster, cluster.entry)
    )
    assert space.size >= 10**6
