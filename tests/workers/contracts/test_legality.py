"""Boundaries of the legality rules, and the numbers that their hints suggest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workers.contracts import ModelSpec, ParallelPlan, plan_problems
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.legality import legality_rules, plan_columns, rotary_problems
from workers.contracts.specs.plan import SCHEDULE_CODES
from workers.contracts.specs.plan_rules.rule import nearest_divisor, nearest_multiples

LLAMA, MOE, GPT2 = preset("llama3-8b"), preset("qwen3-30b-a3b"), preset("gpt2-124m")


def problems(model: ModelSpec | None = LLAMA, **fields: Any) -> list[tuple[str, str]]:
    """`(field, hint)` of each problem."""
    context = {
        name: fields.pop(name) for name in ("seq_len", "devices", "within") if name in fields
    }
    plan = ParallelPlan.from_dict(fields)
    return [
        (item.field, _proposal(item.hint)) for item in plan_problems(plan, model=model, **context)
    ]


def _proposal(hint: str) -> str:
    """The values that a hint proposes."""
    assert hint.startswith("Use ") and hint.endswith("."), hint
    return hint.removeprefix("Use ").removesuffix(".")


def test_divisors_and_multiples() -> None:
    twelve = [nearest_divisor(12, near) for near in range(1, 14)]
    assert twelve == [1, 2, 3, 4, 4, 6, 6, 6, 6, 12, 12, 12, 12]
    assert [nearest_divisor(9, near) for near in (2, 5, 6, 7)] == [1, 3, 3, 9]
    assert (nearest_divisor(1, 5), nearest_divisor(7, 3), nearest_divisor(36, 6)) == (1, 1, 6)
    multiples = [nearest_multiples(8, near) for near in (1, 7, 8, 15, 16)]
    assert multiples == ["8", "8", "8 or 16", "8 or 16", "16 or 24"]


def test_rotary_positions_end_at_their_last_token() -> None:
    reach = LLAMA.max_seq_len
    assert rotary_problems(LLAMA, reach) == []
    problem = rotary_problems(LLAMA, reach + 1)[0]
    assert (problem.field, problem.message) == (
        "seq_len",
        f"{reach + 1} tokens exceed the {reach} rotary positions of llama3-8b",
    )
    assert problem.hint == (
        f"Use {reach}, model.max_seq_len {reach + 1}, or a model.rope.scaling that reaches it."
    )
    assert rotary_problems(GPT2, 10**6) == []


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        ({"name": "linear", "factor": 4.0}, 32768),
        ({"name": "linear", "factor": 4.0, "original_max_seq_len": 4096}, 16384),
        ({"name": "linear", "factor": 1.5, "original_max_seq_len": 4096}, 8192),
    ],
)
def test_scaled_positions_reach_further(scaling: dict[str, Any], reach: int) -> None:
    model = ModelSpec.from_dict(
        {**LLAMA.to_dict(), "max_seq_len": 8192, "rope": {"theta": 1e4, "scaling": scaling}}
    )
    assert rotary_problems(model, reach) == []
    assert rotary_problems(model, reach + 1)[0].message.startswith(
        f"{reach + 1} tokens exceed the {reach} "
    )


def test_dynamic_positions_reach_any_length() -> None:
    scaling = {"name": "dynamic", "factor": 2.0}
    model = ModelSpec.from_dict(
        {**LLAMA.to_dict(), "max_seq_len": 8192, "rope": {"theta": 1e4, "scaling": scaling}}
    )
    assert rotary_problems(model, 10**6) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dp": 2, "devices": 2}, []),
        ({"dp": 2, "devices": 1}, [("plan.dp", "dp 1")]),
        ({"dp": 2, "devices": 4}, [("plan.dp", "dp 4")]),
        ({"dp": 1, "tp": 2, "pp": 2, "cp": 2, "devices": 24}, [("plan.dp", "dp 3")]),
        ({"dp": 1, "tp": 2, "devices": 5}, [("plan.dp", "2 devices")]),
        ({"dp": 2, "cp": 2, "ep": 4, "model": MOE}, []),
        ({"dp": 2, "cp": 3, "ep": 4, "model": MOE}, [("plan.ep", "ep 3")]),
        ({"dp": 4, "dp_replicate": 4, "zero": 3}, []),
        ({"dp": 6, "dp_replicate": 4, "zero": 3}, [("plan.dp_replicate", "3")]),
        (
            {"dp": 3, "micro_batch_size": 2, "global_batch_size": 4},
            [("plan.global_batch_size", "6")],
        ),
        ({"tp": 32}, []),
        ({"tp": 64}, [("plan.tp", "tp 32")]),
        ({"tp": 5, "devices": 5}, [("plan.tp", "tp 1")] * 2),
        ({"tp": 3, "within": 16}, [("plan.tp", "tp 2")] * 2),
        ({"tp": 6, "dp": 2, "within": 16}, [("plan.tp", "tp 4")] * 2),
        ({"pp": 32}, []),
        ({"pp": 33}, [("plan.pp", "pp 32")]),
        ({"pp": 33, "within": 24}, [("plan.pp", "pp 24")]),
        ({"pp": 40, "dp": 2, "within": 48}, [("plan.pp", "pp 24")]),
        (
            {"pp": 32, "schedule": "zb1p", "virtual_stages": 2, "global_batch_size": 32},
            [("plan.pp", "pp 16")],
        ),
        (
            {"pp": 2, "schedule": "zb1p", "virtual_stages": 40, "global_batch_size": 2},
            [("plan.pp", "pp 1")],
        ),
        ({"pp": 2, "virtual_stages": 0}, None),
        ({"ep": 1}, []),
        ({"pp": 1, "stage_layers": [32]}, []),
        ({"pp": 1, "stage_layers": [31]}, [("plan.stage_layers", "[32]")]),
        ({"pp": 1, "stage_layers": [33]}, [("plan.stage_layers", "[32]")]),
        ({"pp": 33, "stage_layers": [1]}, [("plan.pp", "pp 32")]),
        ({"pp": 4, "schedule": "dualpipev", "virtual_stages": 2, "global_batch_size": 8}, []),
        (
            {
                "pp": 4,
                "schedule": "dualpipev",
                "virtual_stages": 2,
                "micro_batch_size": 3,
                "dp": 2,
                "global_batch_size": 42,
            },
            [("plan.global_batch_size", "48, or schedule zbv")],
        ),
        ({"pp": 1, "schedule": "zb1p", "virtual_stages": 2, "zero": 3, "dp": 2}, []),
        (
            {
                "pp": 2,
                "schedule": "zb1p",
                "virtual_stages": 2,
                "zero": 2,
                "dp": 2,
                "global_batch_size": 4,
            },
            [],
        ),
        ({"pp": 4, "schedule": "zb1p", "virtual_stages": 2, "global_batch_size": 2}, []),
        (
            {
                "pp": 3,
                "schedule": "zb1p",
                "virtual_stages": 2,
                "micro_batch_size": 2,
                "dp": 2,
                "global_batch_size": 28,
            },
            [("plan.global_batch_size", "24 or 36")],
        ),
        (
            {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 1},
            [("plan.virtual_stages", "2")],
        ),
        (
            {"pp": 2, "schedule": "zbv", "virtual_stages": 3, "global_batch_size": 4},
            [("plan.virtual_stages", "2")],
        ),
        ({"vertical_sync": True}, [("plan.vertical_sync", "schedule pipedream")]),
        ({"cp": 4, "seq_len": 8}, []),
        ({"cp": 3, "seq_len": 8}, [("plan.cp", "cp 2")]),
        ({"cp": 2, "tp": 4, "sequence_parallel": True, "seq_len": 8}, []),
        (
            {"cp": 2, "tp": 8, "sequence_parallel": True, "seq_len": 8},
            [("plan.sequence_parallel", "a sequence length of 16")],
        ),
        ({"cp": 2, "tp": 8, "seq_len": 8}, []),
        ({"cp": 3, "tp": 8, "sequence_parallel": True, "seq_len": 8}, [("plan.cp", "cp 2")]),
        ({"seq_len": 1024, "model": GPT2}, []),
        ({"seq_len": 1025, "model": GPT2}, [("seq_len", "1024")]),
        ({"tp": 64, "pp": 99, "model": None}, []),
    ],
)
def test_boundaries(fields: dict[str, Any], expected: list[tuple[str, str]] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="virtual_stages"):
            ParallelPlan.from_dict(fields)
    else:
        assert problems(**fields) == expected


def test_a_problem_is_named_after_the_given_field() -> None:
    plan = ParallelPlan.from_dict({"tp": 3})
    for field, expected in (("plan", "plan.tp"), ("serve.plan", "serve.plan.tp"), ("", "tp")):
        assert plan_problems(plan, model=LLAMA, field=field)[0].field == expected


def test_columns_of_a_plan() -> None:
    columns = plan_columns(ParallelPlan())
    assert (columns["stage_entries"], columns["stage_sum"], columns["dp_replicate"]) == (-1, -1, 0)
    assert columns["budget_without_auto"] == columns["weight_stashing"] == 0
    full = plan_columns(
        ParallelPlan(
            pp=2,
            stage_layers=[3, 4],
            dp=2,
            dp_replicate=2,
            schedule="pipedream",
            weight_stashing=True,
            vertical_sync=True,
            sequence_parallel=True,
            recompute="full",
            recompute_budget_bytes=1,
        )
    )
    assert (full["stage_entries"], full["stage_sum"], full["dp_replicate"]) == (2, 7, 2)
    assert full["schedule"] == SCHEDULE_CODES["pipedream"]
    for name in ("weight_stashing", "vertical_sync", "sequence_parallel", "budget_without_auto"):
        assert full[name] == 1
    budget = {"recompute_budget_bytes": 1}
    assert plan_columns(ParallelPlan(recompute="auto", **budget))["budget_without_auto"] == 0


def test_the_rules_have_an_order_and_optional_columns() -> None:
    rules = legality_rules(model=MOE, seq_len=64, devices=8)
    assert [rule.field for rule in rules[:4]] == ["global_batch_size", "dp", "ep", "dp_replicate"]
    assert {rule.optional for rule in rules if rule.optional} == {
        "dp_replicate",
        "weight_stashing",
        "vertical_sync",
        "budget_without_auto",
        "stage_entries",
    }
    assert rules[0].name == "global_batch_size: does not divide by micro_batch_size x dp"
    with pytest.raises(AttributeError):
        rules[0].field = "dp"  # type: ignore[misc]
    assert replace(rules[0], field="dp").field == "dp"


def test_expert_models_check_the_width_of_their_experts() -> None:
    model = MOE.model_copy(update={"moe": MOE.moe and MOE.moe.model_copy(update={"expert_ffn": 6})})
    assert ("plan.tp", "tp 2") in problems(model, tp=4)
    assert ("plan.tp", "tp 2") not in problems(model, tp=2)
    names = {rule.reason for rule in legality_rules(model=MOE) if rule.field == "tp"}
    assert "does not divide ffn" not in names and "does not divide expert_ffn" in names
    assert "does not divide ffn" in {rule.reason for rule in legality_rules(model=LLAMA)}


def test_messages_name_the_numbers() -> None:
    def message(model: ModelSpec | None = LLAMA, **fields: Any) -> str:
        context = {name: fields.pop(name) for name in ("seq_len", "devices") if name in fields}
        return plan_problems(ParallelPlan.from_dict(fields), model=model, **context)[0].message

    assert message(cp=2, tp=8, sequence_parallel=True, seq_len=8) == (
        "4 tokens per rank do not divide by tp 8"
    )
    assert message(dp=3, tp=2, pp=2, cp=2, devices=7) == (
        "dp 3 x tp 2 x pp 2 x cp 2 is 24 devices, not 7"
    )
    assert message(MOE, dp=2, cp=3, ep=4) == "ep 4 does not divide dp x cp = 6"
    assert message(dp=3, micro_batch_size=2, global_batch_size=4) == (
        "4 sequences do not divide by micro_batch_size 2 x dp 3 = 6"
    )
    assert message(
        pp=4, schedule="dualpipev", virtual_stages=2, micro_batch_size=3, dp=2, global_batch_size=42
    ) == ("dualpipev requires at least 2 x pp = 8 micro-batches, there are 7")


def test_stage_layers_have_one_entry_per_virtual_stage() -> None:
    plan = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "global_batch_size": 2}
    assert problems(**plan, stage_layers=[8, 8, 8, 8]) == []
    assert problems(**plan, stage_layers=[32]) == [("plan.stage_layers", "[8, 8, 8, 8]")]
