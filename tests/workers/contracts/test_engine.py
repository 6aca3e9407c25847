"""The only list of what the engine runs: what is beyond it is refused by field, with a message and
a hint.
"""

from __future__ import annotations

from typing import Any

import pytest

from workers.contracts import ParallelPlan, RunSpec
from workers.contracts.specs.training_support import (
    ENGINE_VALUES,
    engine_problems,
    plan_engine_problems,
    unsupported_features,
)

TRAIN = {"steps": 1, "seq_len": 8}


def spec(**changes: Any) -> RunSpec:
    return RunSpec.from_dict({"kind": "train", "train": TRAIN, **changes})


def test_what_it_runs_has_no_problems() -> None:
    assert not engine_problems(spec()) and not unsupported_features(spec())
    plan = {"dp": 4, "zero": 3, "precision": "bf16", "recompute": "full", "reduce_dtype": "fp32"}
    assert not engine_problems(spec(plan=plan))


@pytest.mark.parametrize("field", sorted(ENGINE_VALUES))
def test_every_listed_value_runs_by_itself(field: str) -> None:
    for value in ENGINE_VALUES[field]:
        plan = ParallelPlan.from_dict({} if value is None else {field: value})
        assert field not in str(plan_engine_problems(plan))


def test_an_open_plan_is_for_the_planner_not_for_the_engine() -> None:
    [result] = engine_problems(spec(plan="auto"))
    assert result.field == "plan" and unsupported_features(spec(plan="auto")) == []


@pytest.mark.parametrize(
    "kind", [{"kind": "script", "script": {"command": ["x.py"]}}, {"kind": "external"}]
)
def test_other_kinds_are_not_the_training_engines(kind: dict[str, Any]) -> None:
    assert [item.field for item in engine_problems(RunSpec.from_dict(kind))] == ["kind"]


def test_unsupported_fields_are_reported_by_field_and_label() -> None:
    far = spec(plan={"params_dtype": "bf16", "max_live_params": 9})
    problems = engine_problems(far)
    assert {item.field for item in problems} == {"plan.params_dtype", "plan.max_live_params"}
    assert all(item.hint for item in problems)
    assert set(unsupported_features(far)) == {"params_dtype bf16", "max_live_params 9"}
    assert not engine_problems(spec(plan={"zero": 3, "max_live_params": 9}))


@pytest.mark.parametrize(
    ("plan", "tries"),
    [
        ({"recompute": "selective", "dp": 2, "zero": 3, "precision": "bf16"}, None),
        ({"recompute": "full", "tp": 2, "cp": 2, "pp": 2, "global_batch_size": 4}, None),
        ({"recompute": "selective", "tp": 2}, "compile false, or recompute full"),
        ({"recompute": "auto"}, "compile false, or recompute full or selective"),
        ({"precision": "fp8"}, None),
        ({"precision": "fp8", "fp8_recipe": "block"}, "fp8_recipe tensorwise, or compile false"),
        (
            {"pp": 2, "schedule": "zbv", "global_batch_size": 4},
            "compile false, or schedule interleaved_1f1b",
        ),
        (
            {"pp": 2, "schedule": "pipedream", "global_batch_size": 4},
            "compile false, or schedule 1f1b",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_with_what_to_try(
    plan: dict[str, Any], tries: str | None
) -> None:
    result = engine_problems(spec(plan=plan, train={**TRAIN, "compile": True}))
    assert [item.hint for item in result if item.field == "train.compile"] == (
        [] if tries is None else [f"Use {tries}."]
    )


@pytest.mark.parametrize(
    ("plan", "field", "tries"),
    [
        ({"precision": "fp8", "tp": 2}, "plan.tp", "fp8_recipe block with compile false, or tp 1"),
        (
            {"precision": "bf16", "fp8_recipe": "rowwise"},
            "plan.fp8_recipe",
            "precision fp8, or omit the field",
        ),
    ],
    ids=str,
)
def test_fp8_recipes_name_what_they_exclude(plan: dict[str, Any], field: str, tries: str) -> None:
    [item] = engine_problems(spec(plan=plan, train={**TRAIN, "compile": True}))
    assert (item.field, item.hint) == (field, f"Use {tries}.")
