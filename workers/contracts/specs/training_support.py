"""What the training engine supports: it refuses everything else; forms and planner offer only this.

Does not cover legality (`legality`, `run`) or memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.specs.benchmarks.techniques import as_training, technique_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.train import TrainBody
from workers.contracts.specs.training_rules.exclusions import exclusions_of
from workers.contracts.specs.training_rules.techniques import Combination
from workers.contracts.specs.weight_rounding import group_for, linear_widths, sharded_widths

ENGINE_RUNS = (
    "dp, tp, pp, cp and ep with ZeRO 0 to 3, every schedule, offload, fp32 to fp8, every optimizer"
)
# adapters that the sampler of policy optimization merges into the weights
MERGED_METHODS = ("lora", "rslora", "dora", "qlora")
# the values that each field of a plan may have; zero, dp and the batch are free
ENGINE_VALUES: dict[str, tuple[Any, ...]] = {
    "offload": ("none", "optimizer", "all", "nvme"),
    "recompute": ("none", "selective", "full", "auto"),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
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
                "kind",
                f"the training engine runs kind train, this is {spec.kind}",
                "Use kind train.",
            ),
        )
        return
    if isinstance(spec.plan, str):
        message = "the engine does not choose a plan itself"
        yield (
            "",
            problem(
                "plan",
                message,
                "Set numbers instead of auto, or submit the run so that the planner chooses.",
            ),
        )
    else:
        yield from _values(spec.plan)
    yield from _combined(spec)
    if spec.shape is None:
        message = "the shape of these weights is not known here"
        yield "existing weights", problem("model", message, "Use a preset's name.")


def _combined(spec: RunSpec) -> Refusals:
    plan, model, train = spec.plan, spec.shape, spec.train
    if train is None:
        return
    if model is not None:
        yield from _model(model)
    yield from _training(train)
    if isinstance(plan, str):
        return
    if train.policy is not None and train.adapter is not None and train.adapter.storage:
        yield from _quantized_policy(plan)
    yield from _plan_rules(plan)
    combination = Combination(plan, model, train)
    for first in ("pipedream", "compile"):
        for row in exclusions_of(combination, scope="run", first=first):
            yield row.problem(combination)
    if train.compile:
        yield from _compiled_selective(plan, model)
    for row in exclusions_of(combination, scope="run", first="reference"):
        yield row.problem(combination)
    for first in (
        "torchao_fp8",
        "narrow_weights",
        "rounded_weights",
        "frozen",
        "adapter",
        "nf4",
        "paged",
        "virtual_embeddings",
        "prefix",
    ):
        for row in exclusions_of(combination, scope="run", first=first):
            yield row.problem(combination)
    for row in exclusions_of(combination, scope="run", first="quantize_aware"):
        # sharded widths are known for a given shape only
        if row.techniques[0] == "quantize_aware" or model is not None:
            yield row.problem(combination)
    if train.quantize_aware == "int4" and plan.tp > 1 and model is not None:
        yield from _int4_groups(plan, model)


def _model(model: ModelSpec) -> Refusals:
    if model.attention == "mla" and model.qk_norm:
        message = f"latent attention normalizes its latents, {model.name} has qk_norm as well"
        yield "qk_norm with mla", problem("model.qk_norm", message, "Use qk_norm false.")


def _plan(plan: ParallelPlan) -> Refusals:
    yield from _values(plan)
    yield from _plan_rules(plan)


def _values(plan: ParallelPlan) -> Refusals:
    half = plan.precision if plan.precision in ("bf16", "fp16") else None
    gathered = {"fp8": "bf16"}.get(plan.precision, half) if plan.zero >= 2 else None
    stored = plan.weights_dtype
    dtypes = {
        "reduce_dtype": dict.fromkeys((None, "fp32" if gathered else stored, gathered or stored)),
        "params_dtype": dict.fromkeys((None, "fp32", half)),
        # a gradient has its weights' dtype, as autograd stores it
        "grad_dtype": (None, stored),
    }
    for field, known in {**ENGINE_VALUES, **dtypes}.items():
        value = getattr(plan, field)
        if value in known:
            continue
        values = [str(item) for item in known if item is not None]
        label = str(value) if field == "precision" else f"{field} {value}"
        yield (
            label,
            problem(
                f"plan.{field}",
                f"this engine version does not run {field} {value}",
                f"Use {' or '.join(values)}." if values else "Omit the field.",
            ),
        )


def _plan_rules(plan: ParallelPlan) -> Refusals:
    combination = Combination(plan)
    rows = list(exclusions_of(combination, scope="plan"))
    yield from (row.problem(combination) for row in rows if row.techniques[0].startswith("offload"))
    yield from _gathering(plan)
    yield from _experts(plan)
    yield from (
        row.problem(combination) for row in rows if not row.techniques[0].startswith("offload")
    )


def _gathering(plan: ParallelPlan) -> Refusals:
    for field in ("max_live_params", "param_persistence_threshold"):
        value = getattr(plan, field)
        if value is not None and plan.zero != 3:
            message = f"{field} limits what zero 3 gathers, zero is {plan.zero}"
            yield (
                f"{field} {value}",
                problem(f"plan.{field}", message, "Use zero 3, or omit the field."),
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
            problem("plan.ep", message, f"Use dp_replicate 1 or ep {math.gcd(plan.ep, shards)}."),
        )


def _compiled_selective(plan: ParallelPlan, model: ModelSpec | None) -> Refusals:
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
            problem("train.compile", message, "Use compile false, or recompute full."),
        )


def _int4_groups(plan: ParallelPlan, model: ModelSpec) -> Refusals:
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
                "train.quantize_aware",
                message,
                f"Use tp {_degree_for_groups(model, plan.tp, group)}, or omit the field.",
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
    if train.policy is not None:
        yield from _policy_optimization(train)


def _quantized_policy(plan: ParallelPlan) -> Refusals:
    """What weights in 4 bits exclude where answers are sampled with complete ones."""
    if plan.tp > 1:
        message = f"answers are sampled with complete weights, tp {plan.tp} splits those in 4 bits"
        hint = "Use tp 1, or adapter method lora without quantize."
        yield "nf4 with tp", problem("plan.tp", message, hint)


def _policy_optimization(train: TrainBody) -> Refusals:
    if train.eval is not None:
        message = "held-out prompts are not evaluated during policy optimization"
        yield "eval", problem("train.eval", message, "Submit a run of kind evaluate afterwards.")
    adapter = train.adapter
    if adapter is not None and adapter.method not in MERGED_METHODS:
        message = (
            "answers are sampled with weights of the model's own layers, into which "
            f"{adapter.method} is not merged"
        )
        hint = f"Use method {', '.join(MERGED_METHODS[:-1])} or {MERGED_METHODS[-1]}."
        yield "adapter", problem("train.adapter.method", message, hint)
