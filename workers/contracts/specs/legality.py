"""Which plans are legal for a model, a sequence length and a number of devices: one table of rules.

Each rule is an expression over columns of plans, evaluated on the integers of one plan here and on
NumPy columns by the planner's search. Does not depend on memory or speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import (
    INTERLEAVED,
    SCHEDULE_CODES,
    SPLIT_BACKWARD,
    V_SHAPED,
    ParallelPlan,
)

# integers or integer arrays by name; see `plan_columns`
Columns = Mapping[str, Any]
# message and hint for one illegal plan
Explain = Callable[[ParallelPlan], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason why a plan is illegal.

    `broken` uses only operators that integers and NumPy arrays share (comparisons, `&`, `|` and
    arithmetic; not `~`, which is no negation of a Python bool). A rule with an `optional` column is
    skipped if the columns do not contain it.
    """

    field: str
    reason: str
    broken: Callable[[Columns], Any]
    explain: Explain
    optional: str = ""

    @property
    def name(self) -> str:
        """`field: reason`, the key of the planner's counts of rejected plans."""
        return f"{self.field}: {self.reason}"


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
    rules = [*_degree_rules(devices), *_schedule_rules(), *_sharding_rules()]
    if model is not None:
        available = within if devices is None else devices
        rules += _tensor_rules(model, available) + _layer_rules(model, available)
    if seq_len is not None:
        rules += _sequence_rules(seq_len, model)
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


def nearest_divisor(number: int, near: int) -> int:
    """The divisor of `number` nearest to `near`, the smaller of two equally near."""
    divisors = {
        d for i in range(1, int(number**0.5) + 1) if number % i == 0 for d in (i, number // i)
    }
    return min(divisors, key=lambda d: (abs(d - near), d))


def nearest_multiples(of: int, near: int) -> str:
    """`"8 or 16"`: the multiples of `of` around `near`."""
    below = near // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def _available_to(degree: int, plan: ParallelPlan, available: int | None) -> int:
    """Devices that the plan's other degrees leave to this one.

    0 if the number of devices is not known; all of them if the other degrees do not divide it.
    """
    others = plan.world_size // degree
    return available // others if available and available % others == 0 else available or 0


def _is_one_of(schedule: Any, names: Collection[str]) -> Any:
    mask = schedule == -1
    for name in names:
        mask = mask | (schedule == SCHEDULE_CODES[name])
    return mask


def _micro_batches(c: Columns) -> Any:
    return c["global_batch"] // (c["micro_batch"] * c["dp"])


def _degree_rules(devices: Any) -> list[Rule]:
    def explain_batch(plan: ParallelPlan) -> tuple[str, str]:
        share = plan.micro_batch_size * plan.dp
        return (
            f"{plan.global_batch_size} sequences do not divide by micro_batch_size "
            f"{plan.micro_batch_size} x dp {plan.dp} = {share}",
            f"Use {nearest_multiples(share, plan.global_batch_size)}.",
        )

    def explain_devices(plan: ParallelPlan) -> tuple[str, str]:
        others = plan.tp * plan.pp * plan.cp
        return (
            f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} is {plan.world_size} "
            f"devices, not {devices}",
            (
                f"Use dp {devices // others}."
                if devices % others == 0
                else f"Use {plan.world_size} devices."
            ),
        )

    rules = [
        Rule(
            "global_batch_size",
            "does not divide by micro_batch_size x dp",
            lambda c: c["global_batch"] % (c["micro_batch"] * c["dp"]) != 0,
            explain_batch,
        ),
        Rule(
            "ep",
            "does not divide dp x cp",
            lambda c: (c["dp"] * c["cp"]) % c["ep"] != 0,
            lambda plan: (
                f"ep {plan.ep} does not divide dp x cp = {plan.dp * plan.cp}",
                f"Use ep {nearest_divisor(plan.dp * plan.cp, plan.ep)}.",
            ),
        ),
        Rule(
            "dp_replicate",
            "does not divide dp",
            # 0 stands for no value and is divided by 1
            lambda c: c["dp"] % (c["dp_replicate"] + (c["dp_replicate"] == 0)) != 0,
            lambda plan: (
                f"{plan.dp_replicate} copies do not divide dp {plan.dp}",
                f"Use {nearest_divisor(plan.dp, plan.dp_replicate or 1)}.",
            ),
            optional="dp_replicate",
        ),
    ]
    if devices is not None:
        device_rule = Rule(
            "dp",
            "dp x tp x pp x cp is not the number of devices",
            lambda c: c["dp"] * c["tp"] * c["pp"] * c["cp"] != devices,
            explain_devices,
        )
        rules.insert(1, device_rule)
    return rules


def _schedule_rules() -> list[Rule]:
    def wrong_stages(c: Columns) -> Any:
        code, virtual = c["schedule"], c["virtual_stages"]
        several = V_SHAPED | INTERLEAVED
        return (
            (_is_one_of(code, V_SHAPED) & (virtual != 2))
            | (_is_one_of(code, INTERLEAVED) & (virtual < 2))
            | (_is_one_of(code, SCHEDULE_CODES.keys() - several) & (virtual != 1))
        )

    def explain_stages(plan: ParallelPlan) -> tuple[str, str]:
        name, actual = plan.schedule, f"virtual_stages is {plan.virtual_stages}"
        if name in V_SHAPED:
            return f"{name} requires 2 stages per device, {actual}", "Use 2."
        if name in INTERLEAVED:
            return f"{name} requires at least 2 stages per device, {actual}", "Use 2."
        return f"{name} has one stage per device, {actual}", "Use 1, or schedule interleaved_1f1b."

    def unequal_rounds(c: Columns) -> Any:
        # torch.distributed.pipelining runs them in micro_batches // pp rounds of equal length
        micro_batches = _micro_batches(c)
        rounds = micro_batches // c["pp"]
        return _is_one_of(c["schedule"], INTERLEAVED) & (
            micro_batches % (rounds + (rounds == 0)) != 0
        )

    def explain_rounds(plan: ParallelPlan) -> tuple[str, str]:
        step = plan.pp * plan.micro_batch_size * plan.dp
        rounds = plan.accumulation // plan.pp
        return (
            f"{plan.schedule} runs micro-batches in equal rounds of about pp {plan.pp}, "
            f"{plan.accumulation} do not divide evenly",
            f"Use {rounds * step} or {(rounds + 1) * step}.",
        )

    def explain_dualpipev(plan: ParallelPlan) -> tuple[str, str]:
        return (
            f"dualpipev requires at least 2 x pp = {2 * plan.pp} micro-batches, there are "
            f"{plan.accumulation}",
            f"Use {2 * plan.pp * plan.micro_batch_size * plan.dp}, or schedule zbv.",
        )

    def pipedream_field(name: str) -> Rule:
        return Rule(
            name,
            "belongs to schedule pipedream",
            lambda c: (c["schedule"] != pipedream) & (c[name] > 0),
            lambda plan: (
                f"{name} belongs to schedule pipedream, schedule is {plan.schedule}",
                "Use schedule pipedream.",
            ),
            optional=name,
        )

    pipedream, dualpipev = SCHEDULE_CODES["pipedream"], SCHEDULE_CODES["dualpipev"]
    return [
        Rule("virtual_stages", "not what the schedule requires", wrong_stages, explain_stages),
        Rule(
            "global_batch_size",
            "micro-batches do not divide into equal rounds",
            unequal_rounds,
            explain_rounds,
        ),
        Rule(
            "global_batch_size",
            "too few micro-batches for dualpipev",
            lambda c: (c["schedule"] == dualpipev) & (_micro_batches(c) < 2 * c["pp"]),
            explain_dualpipev,
        ),
        Rule(
            "zero",
            "pipedream stores versions of all weights",
            lambda c: (c["schedule"] == pipedream) & (c["zero"] > 0),
            lambda plan: (
                "pipedream stores several versions of all weights, ZeRO shards them",
                "Use 0.",
            ),
        ),
        pipedream_field("weight_stashing"),
        pipedream_field("vertical_sync"),
    ]


def _sharding_rules() -> list[Rule]:
    return [
        Rule(
            "zero",
            "3 with a schedule that splits the backward pass",
            lambda c: _is_one_of(c["schedule"], SPLIT_BACKWARD) & (c["pp"] > 1) & (c["zero"] == 3),
            lambda plan: (
                f"{plan.schedule} splits the backward pass, and resharding between its halves "
                "loses weight gradients",
                "Use 2, or schedule interleaved_1f1b.",
            ),
        ),
        Rule(
            "recompute_budget_bytes",
            "applies to recompute auto only",
            lambda c: c["budget_without_auto"] > 0,
            lambda plan: (
                f"a budget applies to recompute auto only, recompute is {plan.recompute}",
                "Use recompute auto, or omit the budget.",
            ),
            optional="budget_without_auto",
        ),
    ]


def _tensor_rules(model: ModelSpec, available: int | None) -> list[Rule]:
    heads, kv_heads = model.mfa.heads if model.mfa else model.heads, model.kv_heads

    def hint(plan: ParallelPlan, *numbers: int) -> str:
        left = _available_to(plan.tp, plan, available)
        return f"Use tp {nearest_divisor(math.gcd(*numbers, left), plan.tp)}."

    def width_rule(name: str, width: int) -> Rule:
        return Rule(
            "tp",
            f"does not divide {name}",
            lambda c: width % c["tp"] != 0,
            lambda plan: (
                f"{name} {width} does not divide by tp {plan.tp}",
                hint(plan, width, heads),
            ),
        )

    rules = [
        Rule(
            "tp",
            "does not divide the heads",
            lambda c: heads % c["tp"] != 0,
            lambda plan: (f"{heads} heads do not divide by tp {plan.tp}", hint(plan, heads)),
        )
    ]
    if model.attention == "softmax":
        kv_rule = Rule(
            "tp",
            "neither divides the key-value heads nor is divided by them",
            lambda c: (
                (kv_heads % c["tp"] != 0) & (c["tp"] % kv_heads != 0) & (heads % c["tp"] == 0)
            ),
            lambda plan: (
                f"{kv_heads} key-value heads neither divide by tp {plan.tp} nor into it",
                hint(plan, kv_heads),
            ),
        )
        rules.append(kv_rule)
    widths = {"ffn": model.ffn} if model.moe_layers < model.layers else {}
    if model.moe:
        widths["expert_ffn"] = model.moe.expert_ffn
        if model.moe.shared_experts:
            widths["shared_ffn"] = model.moe.shared_width
    return rules + [width_rule(name, width) for name, width in widths.items()]


def _layer_rules(model: ModelSpec, available: int | None) -> list[Rule]:
    layers = model.layers

    def explain_stages(plan: ParallelPlan) -> tuple[str, str]:
        most = max(1, layers // plan.virtual_stages)
        left = _available_to(plan.pp, plan, available)
        # every pp divides 0, the unknown number of devices
        near = next(pp for pp in range(most, 0, -1) if left % pp == 0)
        return (
            f"{layers} layers are too few for pp {plan.pp} x virtual_stages {plan.virtual_stages} "
            "stages",
            f"Use pp {near}.",
        )

    def wrong_stage_layers(c: Columns) -> Any:
        stages, entries = c["pp"] * c["virtual_stages"], c["stage_entries"]
        wrong = (entries != stages) | (c["stage_sum"] != layers)
        return (entries >= 0) & wrong & (layers >= stages)

    def explain_stage_layers(plan: ParallelPlan) -> tuple[str, str]:
        given = plan.stage_layers or []
        even = plan.model_copy(update={"stage_layers": None}).layers_of_stages(layers)
        if len(given) != plan.stages:
            message = (
                f"{len(given)} entries for {plan.stages} stages (pp {plan.pp} x virtual_stages "
                f"{plan.virtual_stages})"
            )
        else:
            message = f"the entries add up to {sum(given)} layers, {model.name} has {layers}"
        return message, f"Use {even}."

    return [
        Rule(
            "pp",
            "more stages than layers",
            lambda c: layers < c["pp"] * c["virtual_stages"],
            explain_stages,
        ),
        _expert_rule(model),
        Rule(
            "stage_layers",
            "not the stages or not the layers of the model",
            wrong_stage_layers,
            explain_stage_layers,
            optional="stage_entries",
        ),
    ]


def _expert_rule(model: ModelSpec) -> Rule:
    if model.moe is None:
        return Rule(
            "ep",
            "the model has no experts",
            lambda c: c["ep"] > 1,
            lambda plan: (
                f"{model.name} has no experts to distribute over ep {plan.ep}",
                "Use ep 1.",
            ),
        )
    experts = model.moe.experts
    return Rule(
        "ep",
        "does not divide the experts",
        lambda c: experts % c["ep"] != 0,
        lambda plan: (
            f"{experts} experts do not divide by ep {plan.ep}",
            f"Use ep {nearest_divisor(experts, plan.ep)}.",
        ),
    )


def _sequence_rules(seq_len: int, model: ModelSpec | None) -> list[Rule]:
    rules = [
        Rule(
            "cp",
            "does not divide the sequence",
            lambda c: seq_len % c["cp"] != 0,
            lambda plan: (
                f"a sequence of {seq_len} tokens does not divide by cp {plan.cp}",
                f"Use cp {nearest_divisor(seq_len, plan.cp)}.",
            ),
        ),
        Rule(
            "sequence_parallel",
            "tokens of a rank do not divide by tp",
            lambda c: (
                (c["sequence_parallel"] > 0)
                & (seq_len % c["cp"] == 0)
                & ((seq_len // c["cp"]) % c["tp"] != 0)
            ),
            lambda plan: (
                f"{seq_len // plan.cp} tokens per rank do not divide by tp {plan.tp}",
                f"Use a sequence length of {nearest_multiples(plan.cp * plan.tp, seq_len)}.",
            ),
        ),
    ]
    if model is not None and model.position == "learned" and seq_len > model.max_seq_len:
        most, name = model.max_seq_len, model.name
        positions = Rule(
            "seq_len",
            "more tokens than learned positions",
            lambda c: c["cp"] > 0,
            lambda plan: (
                f"{seq_len} tokens exceed the {most} learned positions of {name}",
                f"Use {most}.",
            ),
        )
        rules.append(positions)
    return rules
