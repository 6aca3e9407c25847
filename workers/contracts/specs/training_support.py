"""What the present training engine runs: the one list by which it refuses, and within which forms
and planner choose.

Says nothing of legality (`legality`, `run`) nor of memory; what is legal and not here yet is
refused with what to try.
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
from workers.contracts.specs.weight_rounding import dealt_widths, group_for, linear_widths

ENGINE_RUNS = (
    "dp, tp, pp, cp and ep with ZeRO 0 to 3, every schedule, offload, fp32 to fp8, every optimizer"
)
# the values that each field of a plan may take; zero, dp and the batch are free
ENGINE_VALUES: dict[str, tuple[Any, ...]] = {
    "offload": ("none", "optimizer", "all", "nvme"),
    "recompute": ("none", "selective", "full", "auto"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "params_dtype": (None, "fp32"),
    "grad_dtype": (None, "fp32"),
    "max_live_params": (None,),
}


def engine_problems(spec: RunSpec) -> list[Problem]:
    """Why the engine would refuse this spec at its start; empty for what it runs.

    An "auto" plan is refused: the engine does not choose. Kinds other than train and benchmark are
    refused.
    """
    return [item for _, item in _spec(spec)]


def combination_problems(spec: RunSpec) -> list[Problem]:
    """The part of `engine_problems` that no later engine changes: values that exclude each other.

    Plan resolved.
    """
    return [item for _, item in _combined(as_training(spec))]


def beyond_engine(spec: RunSpec) -> list[str]:
    """The same in a few words each, for a sentence that lists them: `["tp 2", "fp16", "experts"]`."""
    return [words for words, _ in _spec(spec) if words]


def plan_beyond_engine(plan: ParallelPlan) -> list[Problem]:
    """The part of `engine_problems` that a plan alone decides."""
    return [item for _, item in _plan(plan)]


Found = Iterator[tuple[str, Problem]]


def _spec(spec: RunSpec) -> Found:
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
        message = "the engine alone does not choose a plan"
        yield "", problem("plan", message, "numbers, or submit to the planner")
    else:
        yield from _values(spec.plan)
    yield from _combined(spec)
    if spec.shape is None:
        message = "the engine trains a shape; existing weights come in by train.init_from"
        yield "existing weights", problem("model", message, "a preset's name")
    yield from _training(spec.train)


def _combined(spec: RunSpec) -> Found:
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


def _model(model: ModelSpec) -> Found:
    if model.attention == "mla" and model.qk_norm:
        message = f"latent attention norms its latents, {model.name} asks for qk_norm too"
        yield "qk_norm with mla", problem("model.qk_norm", message, "qk_norm false")


def _plan(plan: ParallelPlan) -> Found:
    yield from _values(plan)
    yield from _rules(plan)


def _values(plan: ParallelPlan) -> Found:
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
        tries = [str(item) for item in known if item is not None] or ["leaving it out"]
        words = str(value) if field == "precision" else f"{field} {value}"
        yield (
            words,
            problem(
                f"plan.{field}",
                f"this engine version does not run {field} {value}",
                " or ".join(tries),
            ),
        )


def _rules(plan: ParallelPlan) -> Found:
    yield from _offload(plan)
    yield from _experts(plan)
    if plan.loss_scale is not None and plan.precision != "fp16":
        message = f"loss scaling is for fp16 gradients, precision is {plan.precision}"
        yield (
            f"loss scaling of {plan.precision}",
            problem("plan.loss_scale", message, "leave it out, or precision fp16"),
        )
    if plan.dp_replicate not in (None, 1) and plan.zero < 2:
        message = f"zero {plan.zero} copies everything already"
        yield (
            f"dp_replicate with zero {plan.zero}",
            problem("plan.dp_replicate", message, "zero 2 or 3, or dp_replicate 1"),
        )


def _pipedream(plan: ParallelPlan, model: ModelSpec | None) -> Found:
    """What wants all stages at one step, or other weights than a forward pass had, does not go with
    PipeDream.
    """
    for field in ("tp", "cp", "ep"):
        if getattr(plan, field) > 1:
            message = f"pipedream runs with dp alone beside it, {field} is {getattr(plan, field)}"
            yield (
                f"pipedream with {field}",
                problem(f"plan.{field}", message, f"{field} 1, or schedule 1f1b"),
            )
    if plan.precision not in ("fp32", "bf16"):
        scaled = {
            "fp16": "a loss scale is one for all stages, which pipedream's updates do not wait for"
        }
        message = scaled.get(
            plan.precision,
            f"{plan.precision} weights are quantised at each use, versions are not told",
        )
        yield (
            f"pipedream in {plan.precision}",
            problem("plan.precision", message, "fp32 or bf16, or schedule 1f1b"),
        )
    if plan.precision == "bf16" and plan.weight_stashing is False:
        message = (
            "without stashing a backward pass meets the newest weights, in bf16 it has the "
            "cast of older ones"
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
        tries = "none, or weight_stashing true"
        yield (
            f"pipedream with recompute {plan.recompute} without stashing",
            problem("plan.recompute", message, tries),
        )
    if model is not None and model.moe:
        message = "balancing experts wants a step's loads from all ranks before the next step"
        yield (
            "pipedream with experts",
            problem("model.moe", message, "a dense model, or schedule 1f1b"),
        )


def _experts(plan: ParallelPlan) -> Found:
    shards = plan.dp_shard * plan.cp
    if plan.ep > 1 and plan.zero >= 2 and shards % plan.ep:
        message = (
            f"a copy of the model lies on dp_shard x cp = {shards} ranks, ep {plan.ep} does "
            "not divide them"
        )
        yield (
            f"ep {plan.ep} over copies",
            problem("plan.ep", message, f"dp_replicate 1 or ep {math.gcd(plan.ep, shards)}"),
        )


def _offload(plan: ParallelPlan) -> Found:
    if plan.offload == "all" and plan.zero < 3 and plan.dp * plan.cp > 1:
        message = (
            f"weights come from the host in shards, zero {plan.zero} keeps them whole on "
            f"{plan.dp * plan.cp} ranks"
        )
        yield (
            f"offload all with zero {plan.zero}",
            problem("plan.offload", message, "zero 3, or offload optimizer"),
        )
    if plan.offload != "none" and plan.pp > 1 and plan.schedule == "pipedream":
        message = (
            "pipedream updates after every micro-batch, and keeps versions of weights beside "
            "each other"
        )
        yield (
            f"offload {plan.offload} with pipedream",
            problem("plan.offload", message, "none, or schedule 1f1b"),
        )


def _compiled(plan: ParallelPlan, model: ModelSpec | None) -> Found:
    """What wants to look into a block while it runs does not go with `train.compile`."""
    piped = plan.pp > 1
    if piped and plan.schedule in SPLIT_BACKWARD:
        message = (
            f"{plan.schedule} wants a block's backward pass in two halves, a compiled block "
            "has it in one piece"
        )
        yield (
            f"{plan.schedule} compiled",
            problem("train.compile", message, "compile false, or schedule interleaved_1f1b"),
        )
    if piped and plan.schedule == "pipedream":
        message = "pipedream's backward passes meet other weights than a compiled block expects"
        yield (
            "pipedream compiled",
            problem("train.compile", message, "compile false, or schedule 1f1b"),
        )
    if plan.precision == "fp8":
        message = (
            "fp8 products share what they have quantised, which a compiled block cannot follow"
        )
        yield "fp8 compiled", problem("train.compile", message, "compile false, or precision bf16")
    if plan.recompute == "auto":
        message = (
            "recompute auto measures a block's operators one by one, a compiled block has "
            "fused them"
        )
        yield (
            "recompute auto compiled",
            problem("train.compile", message, "compile false, or recompute full or selective"),
        )
    cut = {
        "tp": plan.tp > 1,
        "cp": plan.cp > 1,
        "experts": model is not None and model.moe is not None,
    }
    if plan.recompute == "selective" and any(cut.values()):
        by = " and ".join(name for name, cuts in cut.items() if cuts)
        message = (
            f"a compiled block keeps products where it is one piece, {by} "
            f"cut{'s' * (sum(cut.values()) == 1)} it"
        )
        yield (
            "recompute selective compiled",
            problem("train.compile", message, "compile false, or recompute full"),
        )


def _aware(train: TrainBody, plan: ParallelPlan, model: ModelSpec | None) -> Found:
    """Where weights cannot be rounded as they will be kept, or something else stands in their
    linears' place.
    """
    kind, field = train.quantize_aware, "train.quantize_aware"
    if plan.precision == "fp8":
        message = "fp8 products round weights to tiles of their own"
        yield f"fp8 aware of {kind}", problem(field, message, "leave it out, or precision bf16")
    if train.compile:
        message = (
            "a compiled block cannot follow weights that are rounded anew for its backward pass"
        )
        yield f"{kind} aware compiled", problem(field, message, "compile false, or leave it out")
    if plan.pp > 1 and plan.schedule == "pipedream":
        message = "pipedream computes with versions of weights, which are not rounded"
        yield f"{kind} aware pipedream", problem(field, message, "leave it out, or schedule 1f1b")
    if plan.tp == 1 or model is None:
        return
    if kind == "int8":
        message = (
            f"int8 has a scale an output, over inputs of which tp {plan.tp} gives each rank a part"
        )
        yield "int8 aware with tp", problem(field, message, "int4, or tp 1")
        return
    group = group_for(linear_widths(model))
    cut = [width for width in dealt_widths(model) if width % (plan.tp * group)]
    if cut:
        message = (
            f"groups of {group} inputs have a scale each, and tp {plan.tp} cuts {cut[0]} "
            "inputs within a group"
        )
        yield (
            "int4 aware with tp",
            problem(field, message, f"tp {_whole_groups(model, plan.tp, group)}, or leave it out"),
        )


def _whole_groups(model: ModelSpec, tp: int, group: int) -> int:
    """The largest degree below `tp` that deals out whole groups."""
    return max(
        each
        for each in range(1, tp)
        if each == 1 or all(w % (each * group) == 0 for w in dealt_widths(model))
    )


def _training(train: TrainBody) -> Found:
    if train.objective != "pretrain":
        message = f"this engine version does not train by {train.objective}"
        yield train.objective, problem("train.objective", message, "pretrain")
    if train.adapter is not None:
        message = "this engine version trains all weights, without adapter"
        yield "adapters", problem("train.adapter", message, "leave it out")
