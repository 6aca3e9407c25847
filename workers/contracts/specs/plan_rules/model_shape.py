"""Rules about the plan and the model's shape: heads, layers, experts, sequence length."""

from __future__ import annotations

import math
from typing import Any

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import (
    ParallelPlan,
)
from workers.contracts.specs.plan_rules.rule import (
    Columns,
    Rule,
    available_to,
    nearest_divisor,
    nearest_multiples,
)


def tensor_rules(model: ModelSpec, available: int | None) -> list[Rule]:
    """Heads and widths that tp does not divide; hints fit `available` devices (None: unknown)."""
    heads, kv_heads = model.mfa.heads if model.mfa else model.heads, model.kv_heads

    def hint(plan: ParallelPlan, *numbers: int) -> str:
        left = available_to(plan.tp, plan, available)
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


def layer_rules(model: ModelSpec, available: int | None) -> list[Rule]:
    """Stages without layers, experts that ep does not divide, `stage_layers` that do not add up."""
    layers = model.layers

    def explain_stages(plan: ParallelPlan) -> tuple[str, str]:
        most = max(1, layers // plan.virtual_stages)
        left = available_to(plan.pp, plan, available)
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


def sequence_rules(seq_len: int, model: ModelSpec | None) -> list[Rule]:
    """Sequences that cp or tp does not divide, or longer than learned positions."""
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
