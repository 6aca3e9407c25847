"""Which plans are legal for a model, a sequence length and a number of devices, and what to try
instead.

Legal is not the same as fitting: memory and speed are the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from workers.contracts.base import Problem, problem
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import INTERLEAVED, SPLIT_BACKWARD, V_SHAPED, ParallelPlan


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

    `within`: a number of devices that suggested degrees go into although the plan need not fill it;
    default `devices`.
    Fields are named `{field}.tp` and so on; a sequence too long for the model is a problem of
    `seq_len`.
    """
    found = [*_batch(plan), *_degrees(plan, devices), *_schedule(plan), *_sharding(plan)]
    if model is not None:
        room = devices or within
        found += [*_tensor(plan, model, room), *_experts(plan, model), *_stages(plan, model, room)]
    if seq_len is not None:
        found += _sequence(plan, seq_len)
    found = [
        item.model_copy(update={"field": f"{field}.{item.field}" if field else item.field})
        for item in found
    ]
    if (
        seq_len is not None
        and model is not None
        and model.position == "learned"
        and seq_len > model.max_seq_len
    ):
        message = (
            f"{seq_len} tokens exceed the {model.max_seq_len} learned positions of {model.name}"
        )
        found.append(problem("seq_len", message, str(model.max_seq_len)))
    return found


def rotary_problems(model: ModelSpec, seq_len: int) -> list[Problem]:
    """A sequence of training that is longer than rotary positions reach. (The planner may count
    with such a one.)

    Scaled ones reach `factor` times the original context, dynamic ones any length.
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
    return [
        problem(
            "seq_len",
            message,
            f"{reach}, model.max_seq_len {seq_len} or a model.rope.scaling that reaches it",
        )
    ]


def nearest_divisor(number: int, near: int) -> int:
    """The divisor of `number` nearest to `near`, the smaller of two equally near."""
    divisors = {
        d for i in range(1, int(number**0.5) + 1) if number % i == 0 for d in (i, number // i)
    }
    return min(divisors, key=lambda d: (abs(d - near), d))


def _beside(degree: int, plan: ParallelPlan, room: int | None) -> int:
    """The devices that the plan's other degrees leave to this one; 0 where nothing is known or they
    do not divide.
    """
    others = plan.world_size // degree
    return room // others if room and room % others == 0 else room or 0


def nearest_multiples(of: int, near: int) -> str:
    """`"8 or 16"`: the multiples of `of` around `near`."""
    below = near // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def _batch(plan: ParallelPlan) -> Iterator[Problem]:
    share = plan.micro_batch_size * plan.dp
    if plan.global_batch_size % share:
        yield problem(
            "global_batch_size",
            f"{plan.global_batch_size} sequences do not divide by micro_batch_size "
            f"{plan.micro_batch_size} x "
            f"dp {plan.dp} = {share}",
            nearest_multiples(share, plan.global_batch_size),
        )


def _degrees(plan: ParallelPlan, devices: int | None) -> Iterator[Problem]:
    if devices is not None and plan.world_size != devices:
        rest = plan.tp * plan.pp * plan.cp
        yield problem(
            "dp",
            f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} is {plan.world_size} "
            f"devices, not {devices}",
            f"dp {devices // rest}" if devices % rest == 0 else f"{plan.world_size} devices",
        )
    if plan.dp_replicate and plan.dp % plan.dp_replicate:
        yield problem(
            "dp_replicate",
            f"{plan.dp_replicate} copies do not divide dp {plan.dp}",
            str(nearest_divisor(plan.dp, plan.dp_replicate)),
        )
    if (plan.dp * plan.cp) % plan.ep:
        yield problem(
            "ep",
            f"ep {plan.ep} does not divide dp x cp = {plan.dp * plan.cp}",
            f"ep {nearest_divisor(plan.dp * plan.cp, plan.ep)}",
        )


def _schedule(plan: ParallelPlan) -> Iterator[Problem]:
    name, virtual, micro_batches = plan.schedule, plan.virtual_stages, plan.accumulation
    if name in V_SHAPED and virtual != 2:
        yield problem(
            "virtual_stages", f"{name} folds the pipeline in two, virtual_stages is {virtual}", "2"
        )
    elif name in INTERLEAVED and virtual < 2:
        yield problem(
            "virtual_stages",
            f"{name} wants at least 2 stages a device, virtual_stages is {virtual}",
            "2",
        )
    elif name not in V_SHAPED | INTERLEAVED and virtual != 1:
        yield problem(
            "virtual_stages",
            f"{name} has one stage a device, virtual_stages is {virtual}",
            "1, or interleaved_1f1b",
        )
    if name in INTERLEAVED and micro_batches % max(1, micro_batches // plan.pp):
        # torch.distributed.pipelining runs them in micro_batches // pp rounds of equal length
        share = plan.micro_batch_size * plan.dp
        yield problem(
            "global_batch_size",
            f"{name} runs micro-batches in equal rounds of about pp {plan.pp}, {micro_batches} do "
            "not divide so",
            f"{micro_batches // plan.pp * plan.pp * share} or "
            f"{(micro_batches // plan.pp + 1) * plan.pp * share}",
        )
    if name == "dualpipev" and micro_batches < 2 * plan.pp:
        batch = 2 * plan.pp * plan.micro_batch_size * plan.dp
        yield problem(
            "global_batch_size",
            f"dualpipev wants at least 2 x pp = {2 * plan.pp} micro-batches, there are "
            f"{micro_batches}",
            f"{batch}, or schedule zbv",
        )
    if name == "pipedream":
        if plan.zero:
            yield problem(
                "zero",
                "pipedream keeps several versions of whole weights, sharding splits them",
                "0",
            )
    else:
        for field in ("weight_stashing", "vertical_sync"):
            if getattr(plan, field):
                yield problem(
                    field,
                    f"{field} belongs to schedule pipedream, schedule is {name}",
                    "schedule pipedream",
                )


def _sharding(plan: ParallelPlan) -> Iterator[Problem]:
    if plan.zero == 3 and plan.schedule in SPLIT_BACKWARD and plan.pp > 1:
        yield problem(
            "zero",
            f"{plan.schedule} splits the backward pass, and resharding between its halves loses "
            "weight gradients",
            "2, or schedule interleaved_1f1b",
        )
    if plan.recompute_budget_bytes is not None and plan.recompute != "auto":
        yield problem(
            "recompute_budget_bytes",
            f"a budget steers recompute auto, recompute is {plan.recompute}",
            "recompute auto, or no budget",
        )


def _tensor(plan: ParallelPlan, model: ModelSpec, room: int | None) -> Iterator[Problem]:
    tp = plan.tp
    if tp == 1:
        return
    left = _beside(tp, plan, room)
    heads = model.mfa.heads if model.mfa else model.heads
    if heads % tp:
        yield problem(
            "tp",
            f"{heads} heads do not divide by tp {tp}",
            f"tp {nearest_divisor(math.gcd(heads, left), tp)}",
        )
    elif model.attention == "softmax" and model.kv_heads % tp and tp % model.kv_heads:
        yield problem(
            "tp",
            f"{model.kv_heads} key-value heads neither divide by tp {tp} nor into it",
            f"tp {nearest_divisor(math.gcd(model.kv_heads, left), tp)}",
        )
    widths = {"ffn": model.ffn} if model.moe_layers < model.layers else {}
    if model.moe:
        widths["expert_ffn"] = model.moe.expert_ffn
        if model.moe.shared_experts:
            widths["shared_ffn"] = model.moe.shared_width
    for name, width in widths.items():
        if width % tp:
            near = nearest_divisor(math.gcd(width, heads, left), tp)
            yield problem("tp", f"{name} {width} does not divide by tp {tp}", f"tp {near}")


def _experts(plan: ParallelPlan, model: ModelSpec) -> Iterator[Problem]:
    if plan.ep == 1:
        return
    if model.moe is None:
        yield problem("ep", f"{model.name} has no experts to spread over ep {plan.ep}", "ep 1")
    elif model.moe.experts % plan.ep:
        near = nearest_divisor(model.moe.experts, plan.ep)
        yield problem(
            "ep", f"{model.moe.experts} experts do not divide by ep {plan.ep}", f"ep {near}"
        )


def _stages(plan: ParallelPlan, model: ModelSpec, room: int | None) -> Iterator[Problem]:
    if model.layers < plan.stages:
        most, left = max(1, model.layers // plan.virtual_stages), _beside(plan.pp, plan, room)
        # 0 devices told: any number goes
        near = next(each for each in range(most, 0, -1) if left % each == 0)
        yield problem(
            "pp",
            f"{model.layers} layers are too few for pp {plan.pp} x virtual_stages "
            f"{plan.virtual_stages} stages",
            f"pp {near}",
        )
    elif plan.stage_layers is None:
        return
    elif len(plan.stage_layers) != plan.stages:
        yield problem(
            "stage_layers",
            f"{len(plan.stage_layers)} entries for {plan.stages} stages (pp {plan.pp} x "
            "virtual_stages "
            f"{plan.virtual_stages})",
            str(plan.model_copy(update={"stage_layers": None}).layers_of_stages(model.layers)),
        )
    elif sum(plan.stage_layers) != model.layers:
        yield problem(
            "stage_layers",
            f"the entries add up to {sum(plan.stage_layers)} layers, {model.name} has "
            f"{model.layers}",
            str(plan.model_copy(update={"stage_layers": None}).layers_of_stages(model.layers)),
        )


def _sequence(plan: ParallelPlan, seq_len: int) -> Iterator[Problem]:
    if seq_len % plan.cp:
        yield problem(
            "cp",
            f"a sequence of {seq_len} tokens does not divide by cp {plan.cp}",
            f"cp {nearest_divisor(seq_len, plan.cp)}",
        )
    elif plan.sequence_parallel and (seq_len // plan.cp) % plan.tp:
        yield problem(
            "sequence_parallel",
            f"{seq_len // plan.cp} tokens a rank do not divide by tp {plan.tp}",
            f"a sequence length of {nearest_multiples(plan.cp * plan.tp, seq_len)}",
        )
