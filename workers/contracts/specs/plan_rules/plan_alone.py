"""Rules about the plan alone: its degrees, schedule and sharding."""

from __future__ import annotations

from typing import Any

from workers.contracts.specs.plan import (
    INTERLEAVED,
    SCHEDULE_CODES,
    SPLIT_BACKWARD,
    V_SHAPED,
    ParallelPlan,
)
from workers.contracts.specs.plan_rules.rule import (
    Columns,
    Rule,
    is_one_of,
    micro_batches_of,
    nearest_divisor,
    nearest_multiples,
)


def degree_rules(devices: Any) -> list[Rule]:
    """Degrees that do not divide the batch, each other or the devices (None: any number)."""

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


def schedule_rules() -> list[Rule]:
    """Stages, micro-batches and options that the pipeline schedule does not allow."""

    def wrong_stages(c: Columns) -> Any:
        code, virtual = c["schedule"], c["virtual_stages"]
        several = V_SHAPED | INTERLEAVED
        return (
            (is_one_of(code, V_SHAPED) & (virtual != 2))
            | (is_one_of(code, INTERLEAVED) & (virtual < 2))
            | (is_one_of(code, SCHEDULE_CODES.keys() - several) & (virtual != 1))
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
        micro_batches = micro_batches_of(c)
        rounds = micro_batches // c["pp"]
        return is_one_of(c["schedule"], INTERLEAVED) & (
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
            lambda c: (c["schedule"] == dualpipev) & (micro_batches_of(c) < 2 * c["pp"]),
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


def sharding_rules() -> list[Rule]:
    """ZeRO stages and recomputation that other fields exclude."""
    return [
        Rule(
            "zero",
            "3 with a schedule that splits the backward pass",
            lambda c: is_one_of(c["schedule"], SPLIT_BACKWARD) & (c["pp"] > 1) & (c["zero"] == 3),
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
