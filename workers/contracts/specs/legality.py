"""Which plans are legal for a model, a sequence length and a number of devices: one table of rules.

Each rule is an expression over columns of plans, evaluated on the integers of one plan here and on
NumPy columns by the planner's search. Does not depend on memory or speed.
"""

from __future__ import annotations

from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import (
    SCHEDULE_CODES,
    ParallelPlan,
)
from workers.contracts.specs.plan_rules.model_shape import (
    layer_rules,
    sequence_rules,
    tensor_rules,
)
from workers.contracts.specs.plan_rules.plan_alone import (
    degree_rules,
    schedule_rules,
    sharding_rules,
)
from workers.contracts.specs.plan_rules.rule import (
    Rule,
)


def plan_problems(
    plan: ParallelPlan,
    *,
    model: ModelSpec | None,
    seq_len: int | None = None,
    devices: int | None = None,
    within: int | None = None,
    field: str = "plan",
) -> list[Problem]:
    """Everything that makes the plan illegal; an empty list means legal.

    `within`: a number of devices that suggested degrees must divide although the plan need not use
    all of them; default `devices`. Fields are named `{field}.tp` and so on; a sequence too long for
    the model is a problem of `seq_len`.
    """
    columns = plan_columns(plan)
    problems = []
    for rule in legality_rules(model=model, seq_len=seq_len, devices=devices, within=within):
        if rule.broken(columns):
            path = f"{field}.{rule.field}" if field and rule.field != "seq_len" else rule.field
            problems.append(problem(path, *rule.explain(plan)))
    return problems


def legality_rules(
    *,
    model: ModelSpec | None,
    seq_len: int | None = None,
    devices: Any = None,
    within: int | None = None,
) -> list[Rule]:
    """The rules that apply, in order of precedence; explaining one needs an integer `devices`."""
    rules = [*degree_rules(devices), *schedule_rules(), *sharding_rules()]
    if model is not None:
        available = within if devices is None else devices
        rules += tensor_rules(model, available) + layer_rules(model, available)
    if seq_len is not None:
        rules += sequence_rules(seq_len, model)
    return rules


def plan_columns(plan: ParallelPlan) -> dict[str, int]:
    """The columns that rules read, for one plan.

    `schedule` is a code of SCHEDULE_CODES, `dp_replicate` 0 if not set; `stage_entries` and
    `stage_sum` are length and sum of `stage_layers`, -1 if not set.
    """
    layers = plan.stage_layers
    return {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": plan.cp,
        "ep": plan.ep,
        "zero": plan.zero,
        "sequence_parallel": int(plan.sequence_parallel),
        "schedule": SCHEDULE_CODES[plan.schedule],
        "virtual_stages": plan.virtual_stages,
        "micro_batch": plan.micro_batch_size,
        "global_batch": plan.global_batch_size,
        "dp_replicate": plan.dp_replicate or 0,
        "weight_stashing": int(bool(plan.weight_stashing)),
        "vertical_sync": int(bool(plan.vertical_sync)),
        "budget_without_auto": int(
            plan.recompute_budget_bytes is not None and plan.recompute != "auto"
        ),
        "stage_entries": -1 if layers is None else len(layers),
        "stage_sum": -1 if layers is None else sum(layers),
    }


def rotary_problems(model: ModelSpec, seq_len: int) -> list[Problem]:
    """Training sequences that are longer than rotary positions reach; the planner accepts them.

    Scaled positions reach `factor` times the original context, dynamic ones any length.
    """
    scaling, reach = model.rope.scaling, model.max_seq_len
    if scaling is not None:
        reach = max(reach, int((scaling.original_max_seq_len or reach) * scaling.factor))
    if (
        model.position != "rope"
        or seq_len <= reach
        or (scaling is not None and scaling.name == "dynamic")
    ):
        return []
    message = f"{seq_len} tokens exceed the {reach} rotary positions of {model.name}"
    hint = f"Use {reach}, model.max_seq_len {seq_len}, or a model.rope.scaling that reaches it."
    return [problem("seq_len", message, hint)]
