"""What the training engine supports: it refuses everything else; forms and planner offer only this.

Does not cover legality (`legality`, `run`) or memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.specs.benchmark import as_training, technique_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import SPLIT_BACKWARD, ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.run_bodies import TrainBody
from workers.contracts.specs.weight_rounding import group_for, linear_widths, sharded_widths

ENGINE_RUNS = (
    "dp, tp, pp, cp and ep with ZeRO 0 to 3, every schedule, offload, fp32 to fp8, every optimizer"
)
# the values that each field of a plan may have; zero, dp and the batch are free
ENGINE_VALUES: dict[str, tuple[Any, ...]] = {
    "offload": ("none", "optimizer", "all", "nvme"),
    "recompute": ("none", "selective", "full", "auto"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "params_dtype": (None, "fp32"),
    "grad_dtype": (None, "fp32"),
    "max_live_params": (None,),
}


def engine_problems(spec: RunSpec) -> list[Problem]:
    """Why the engine refuses this spec; empty if it runs it.

    It refuses an "auto" plan, and kinds other than train and benchmark.
    """
    return [item for _, item in _spec(spec)]


def combination_problems(spec: RunSpec) -> list[Problem]:
    """The part of `engine_problems` about values that exclude each other, for a resolved plan."""
    return [item for _, item in _combined(as_training(spec))]


def unsupported_features(spec: RunSpec) -> list[str]:
    """`engine_problems` as short labels: `["tp 2", "fp16", "experts"]`."""
    return [label for label, _ in _spec(spec) if label]


def plan_engine_problems(plan: ParallelPlan) -> list[Problem]:
    """The part of `engine_problems` that follows from the plan alone."""
    return [item for _, item in _plan(plan)]


# short label and problem
Refusals = Iterator[tuple[str, Problem]]


def _spec(spec: RunSpec) -> Refusals:
    if spec.benchmark is not None:
        for item in technique_problems(spec.benchmark):
            yield "", item
        spec = as_training(spec)
    if spec.kind != "train" or spec.train is None:
        yield (
            spec.kind,
            problem(
                "kind", f"the training engine runs kind train, this is {spec.kind}", "kind train"
            ),
        )
        return
    if isinstance(spec.plan, str):
        message = "the engine does not choose a plan itself"
        yield "", problem("plan", message, "numbers, or submit to the planner")
    else:
        yield from _values(spec.plan)
    yield from _combined(spec)
    if spec.shape is None:
        message = "model must be a shape; train.init_from loads existing weights"
        yield "existing weights", problem("model", message, "a preset's name")
    yield from _training(spec.train)


def _combined(spec: RunSpec) -> Refusals:
    plan, model, train = spec.plan, spec.shape, spec.train
    if train is None:
        return
    if model is not None:
        yield from _model(model)
    if isinstance(plan, str):
        return
    yield from _rules(plan)
    if plan.pp > 1 and plan.schedule == "pipedream":
        yield from _pipedream(plan, model)
    if train.compile:
        yield from _compiled(plan, model)
    if train.quantize_aware is not None:
        yield from _aware(train, plan, model)


def _model(model: ModelSpec) -> Refusals:
    if model.attention == "mla" and model.qk_norm:
        message = f"latent attention normalises its latents, {model.name} has qk_norm as well"
        yield "qk_norm with mla", problem("model.qk_norm", message, "qk_norm false")


def _plan(plan: ParallelPlan) -> Refusals:
    yield from _values(plan)
    yield from _rules(plan)


def _values(plan: ParallelPlan) -> Refusals:
    gathered = (
        {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(plan.precision)
        if plan.zero >= 2
        else None
    )
    reduced = (None, "fp32", gathered) if gathered else (None, "fp32")
    for field, known in {**ENGINE_VALUES, "reduce_dtype": reduced}.items():
        value = getattr(plan, field)
        if value in known:
            continue
        hints = [str(item) for item in known if item is not None] or ["leaving it out"]
        label = str(value) if field == "precision" else f"{field} {value}"
        yield (
            label,
            problem(
                f"plan.{field}",
                f"this engine version does not run {field} {value}",
                " or ".join(hints),
            ),
        )


def _rules(plan: ParallelPlan) -> Refusals:
    yield from _offload(plan)
    yield from _experts(plan)
    if plan.loss_scale is not None and plan.precision != "fp16":
        message = f"loss scaling is for fp16 gradients, precision is {plan.precision}"
        yield (
            f"loss scaling of {plan.precision}",
            problem("plan.loss_scale", message, "leave it out, or precision fp16"),
        )
    if plan.dp_replicate not in (None, 1) and plan.zero < 2:
        message = f"zero {plan.zero} already replicates everything"
        yield (
            f"dp_replicate with zero {plan.zero}",
            problem("plan.dp_replicate", message, "zero 2 or 3, or dp_replicate 1"),
        )


def _pipedream(plan: ParallelPlan, model: ModelSpec | None) -> Refusals:
    """PipeDream's stages are at different steps, and its weights change between passes."""
    for field in ("tp", "cp", "ep"):
        if getattr(plan, field) > 1:
            message = f"pipedream can be combined with dp only, {field} is {getattr(plan, field)}"
            yield (
                f"pipedream with {field}",
                problem(f"plan.{field}", message, f"{field} 1, or schedule 1f1b"),
            )
    if plan.precision not in ("fp32", "bf16"):
        scaled = {
            "fp16": "all stages share one loss scale, which pipedream's updates do not wait for"
        }
        message = scaled.get(
            plan.precision,
            f"{plan.precision} weights are quantised at each use, without their versions",
        )
        yield (
            f"pipedream in {plan.precision}",
            problem("plan.precision", message, "fp32 or bf16, or schedule 1f1b"),
        )
    if plan.precision == "bf16" and plan.weight_stashing is False:
        message = (
            "without stashing a backward pass uses the newest weights, but in bf16 the cast of "
            "older ones"
        )
        yield (
            "pipedream in bf16 without stashing",
            problem("plan.weight_stashing", message, "true, or precision fp32"),
        )
    if plan.recompute != "none" and plan.weight_stashing is False:
        message = (
            f"without stashing recompute {plan.recompute} would run a forward pass again with "
            "newer weights"
        )
        hint = "none, or weight_stashing true"
        yield (
            f"pipedream with recompute {plan.recompute} without stashing",
            problem("plan.recompute", message, hint),
        )
    if model is not None and model.moe:
        message = "balancing experts needs the loads of all ranks before the next step"
        yield (
            "pipedream with experts",
            problem("model.moe", message, "a dense model, or schedule 1f1b"),
        )


def _experts(plan: ParallelPlan) -> Refusals:
    shards = plan.dp_shard * plan.cp
    if plan.ep > 1 and plan.zero >= 2 and shards % plan.ep:
        message = (
            f"a replica of the model has dp_shard x cp = {shards} ranks, ep {plan.ep} does "
            "not divide them"
        )
        yield (
            f"ep {plan.ep} over copies",
            problem("plan.ep", message, f"dp_replicate 1 or ep {math.gcd(plan.ep, shards)}"),
        )


def _offload(plan: ParallelPlan) -> Refusals:
    if plan.offload == "all" and plan.zero < 3 and plan.dp * plan.cp > 1:
        message = (
            f"weights are loaded from the host in shards, zero {plan.zero} replicates them on "
            f"{plan.dp * plan.cp} ranks"
        )
        yield (
            f"offload all with zero {plan.zero}",
            problem("plan.offload", message, "zero 3, or offload optimizer"),
        )
    if plan.offload != "none" and plan.pp > 1 and plan.schedule == "pipedream":
        message = (
            "pipedream updates after every micro-batch, and stores several versions of the weights"
        )
        yield (
            f"offload {plan.offload} with pipedream",
            problem("plan.offload", message, "none, or schedule 1f1b"),
        )


def _compiled(plan: ParallelPlan, model: ModelSpec | None) -> Refusals:
    """`train.compile` excludes what needs access to a block while it runs."""
    piped = plan.pp > 1
    if piped and plan.schedule in SPLIT_BACKWARD:
        message = (
            f"{plan.schedule} splits a block's backward pass, a compiled block cannot be split"
        )
        yield (
            f"{plan.schedule} compiled",
            problem("train.compile", message, "compile false, or schedule interleaved_1f1b"),
        )
    if piped and plan.schedule == "pipedream":
        message = "pipedream's backward passes use other weights than a compiled block expects"
        yield (
            "pipedream compiled",
            problem("train.compile", message, "compile false, or schedule 1f1b"),
        )
    if plan.precision == "fp8":
        message = "fp8 products share quantised tensors, which a compiled block does not support"
        yield "fp8 compiled", problem("train.compile", message, "compile false, or precision bf16")
    if plan.recompute == "auto":
        message = (
            "recompute auto measures a block's operators one by one, a compiled block fuses them"
        )
        yield (
            "recompute auto compiled",
            problem("train.compile", message, "compile false, or recompute full or selective"),
        )
    splits = {
        "tp": plan.tp > 1,
        "cp": plan.cp > 1,
        "experts": model is not None and model.moe is not None,
    }
    if plan.recompute == "selective" and any(splits.values()):
        by = " and ".join(name for name, splits_it in splits.items() if splits_it)
        message = (
            "selective recompute needs an unsplit compiled block, "
            f"{by} split{'s' * (sum(splits.values()) == 1)} it"
        )
        yield (
            "recompute selective compiled",
            problem("train.compile", message, "compile false, or recompute full"),
        )


def _aware(train: TrainBody, plan: ParallelPlan, model: ModelSpec | None) -> Refusals:
    """Where weights cannot be quantised as they will be stored, or other linear layers are used."""
    kind, field = train.quantize_aware, "train.quantize_aware"
    if plan.precision == "fp8":
        message = "fp8 products quantise weights by their own tiles"
        yield f"fp8 aware of {kind}", problem(field, message, "leave it out, or precision bf16")
    if train.compile:
        message = "a compiled block cannot quantise weights again for its backward pass"
        yield f"{kind} aware compiled", problem(field, message, "compile false, or leave it out")
    if plan.pp > 1 and plan.schedule == "pipedream":
        message = "pipedream computes with versions of weights, which are not quantised"
        yield f"{kind} aware pipedream", problem(field, message, "leave it out, or schedule 1f1b")
    if plan.tp == 1 or model is None:
        return
    if kind == "int8":
        message = f"int8 has one scale per output over all inputs, which tp {plan.tp} shards"
        yield "int8 aware with tp", problem(field, message, "int4, or tp 1")
        return
    group = group_for(linear_widths(model))
    split = [width for width in sharded_widths(model) if width % (plan.tp * group)]
    if split:
        message = (
            f"each group of {group} inputs has a scale, and tp {plan.tp} splits {split[0]} "
            "inputs within a group"
        )
        yield (
            "int4 aware with tp",
            problem(
                field, message, f"tp {_degree_for_groups(model, plan.tp, group)}, or leave it out"
            ),
        )


def _degree_for_groups(model: ModelSpec, tp: int, group: int) -> int:
    """The largest degree below `tp` that shards by complete groups."""
    return max(
        degree
        for degree in range(1, tp)
        if degree == 1 or all(w % (degree * group) == 0 for w in sharded_widths(model))
    )


def _training(train: TrainBody) -> Refusals:
    if train.objective != "pretrain":
        message = f"this engine version does not train by {train.objective}"
        yield train.objective, problem("train.objective", message, "pretrain")
    if train.adapter is not None:
        message = "this engine version trains all weights, without adapter"
        yield "adapters", problem("train.adapter", message, "leave it out")
