"""What the present training engine runs: the one list by which it refuses, and within which forms and planner choose.

Says nothing of legality (`legality`, `run`) nor of memory; what is legal and not here yet is refused with what to try.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.bodies import TrainBody
from workers.contracts.model import ModelSpec
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec

ENGINE_RUNS = "dp with ZeRO 0 to 3, fp32, bf16 and fp16, every optimizer"
# the values that each field of a plan may take; zero, dp and the batch are free
ENGINE_VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1,),
    "pp": (1,),
    "cp": (1,),
    "ep": (1,),
    "offload": ("none",),
    "recompute": ("none", "full"),
    "precision": ("fp32", "bf16", "fp16"),
    "params_dtype": (None, "fp32"),
    "grad_dtype": (None, "fp32"),
    "max_live_params": (None,),
}


def engine_problems(spec: RunSpec) -> list[Problem]:
    """Why the engine would refuse this spec at its start; empty for what it runs.

    An "auto" plan is refused: the engine does not choose. Kinds other than train are refused as such.
    """
    return [item for _, item in _spec(spec)]


def beyond_engine(spec: RunSpec) -> list[str]:
    """The same in a few words each, for a sentence that lists them: `["tp 2", "fp16", "experts"]`."""
    return [words for words, _ in _spec(spec) if words]


def plan_beyond_engine(plan: ParallelPlan) -> list[Problem]:
    """The part of `engine_problems` that a plan alone decides."""
    return [item for _, item in _plan(plan)]


Found = Iterator[tuple[str, Problem]]


def _spec(spec: RunSpec) -> Found:
    if spec.kind != "train" or spec.train is None:
        yield spec.kind, problem("kind", f"the training engine runs kind train, this is {spec.kind}", "kind train")
        return
    if isinstance(spec.plan, str):
        says = "the engine alone does not choose a plan"
        yield "", problem("plan", says, "numbers, or submit to the planner")
    else:
        yield from _plan(spec.plan)
    if spec.shape is None:
        says = "the engine trains a shape; existing weights come in by train.init_from"
        yield "existing weights", problem("model", says, "a preset's name")
    else:
        yield from _model(spec.shape)
    yield from _training(spec.train)


def _model(model: ModelSpec) -> Found:
    if model.attention == "mla" and model.qk_norm:
        says = f"latent attention norms its latents, {model.name} asks for qk_norm too"
        yield "qk_norm with mla", problem("model.qk_norm", says, "qk_norm false")


def _plan(plan: ParallelPlan) -> Found:
    half = plan.precision in ("bf16", "fp16") and plan.zero >= 2
    reduced = (None, "fp32", plan.precision) if half else (None, "fp32")
    for field, known in {**ENGINE_VALUES, "reduce_dtype": reduced}.items():
        value = getattr(plan, field)
        if value in known:
            continue
        if known == (1,):
            says, try_ = f"this engine version is data parallel only, {field} is {value}", f"{field} 1"
            yield f"{field} {value}", problem(f"plan.{field}", says, f"{try_} and dp {plan.world_size}")
            continue
        tries = [str(item) for item in known if item is not None] or ["leaving it out"]
        words = str(value) if field == "precision" else f"{field} {value}"
        yield words, problem(f"plan.{field}", f"this engine version does not run {field} {value}", " or ".join(tries))
    if plan.loss_scale is not None and plan.precision != "fp16":
        says = f"loss scaling is for fp16 gradients, precision is {plan.precision}"
        yield f"loss scaling of {plan.precision}", problem("plan.loss_scale", says, "leave it out, or precision fp16")
    if plan.dp_replicate not in (None, 1) and plan.zero < 2:
        says = f"zero {plan.zero} copies everything already"
        yield (
            f"dp_replicate with zero {plan.zero}",
            problem("plan.dp_replicate", says, "zero 2 or 3, or dp_replicate 1"),
        )


def _training(train: TrainBody) -> Found:
    if train.objective != "pretrain":
        says = f"this engine version does not train by {train.objective}"
        yield train.objective, problem("train.objective", says, "pretrain")
    if train.adapter is not None:
        says = "this engine version trains all weights, without adapter"
        yield "adapters", problem("train.adapter", says, "leave it out")
    if train.compile:
        yield "torch.compile", problem("train.compile", "this engine version runs eagerly", "compile false")
