"""From a spec file to a run this engine can do: read, checked, and refused by sentences where it cannot.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import Problem, problem, problems_of
from workers.contracts.bodies import TrainBody
from workers.contracts.counts import flops_per_token, parameter_count
from workers.contracts.model import ModelSpec
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec, spec_problems
from workers.training.exits import UserError


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A spec whose parts are all known: nothing is left to be chosen."""

    spec: RunSpec
    model: ModelSpec
    plan: ParallelPlan
    train: TrainBody

    @property
    def tokens_per_step(self) -> int:
        return self.plan.global_batch_size * self.train.seq_len

    def describe(self) -> dict[str, Any]:
        """What `--print` shows: the spec with every default filled in, and what follows from it."""
        return {
            "spec": self.spec.to_dict(),
            "model": self.model.to_dict(),
            "plan": self.plan.to_dict(),
            "world_size": self.plan.world_size,
            "mesh": mesh_axes(self.plan),
            "accumulation": self.plan.accumulation,
            "tokens_per_step": self.tokens_per_step,
            "parameters": parameter_count(self.model).total,
            "flops_per_token": flops_per_token(self.model, self.train.seq_len),
        }


def mesh_axes(plan: ParallelPlan) -> dict[str, int]:
    """Axis names and sizes of the device mesh, outer to inner."""
    if plan.zero >= 2:
        return {"dp_replicate": plan.dp_replicate or 1, "dp_shard": plan.dp_shard}
    return {"dp": plan.dp}


def load_run(path: Path) -> TrainingRun:
    """Read and check a spec file. Raises UserError with one line a problem."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"spec {path} cannot be read: {error.strerror}; try --spec with an existing file") from None
    except ValueError as error:
        raise UserError(f"spec {path} is not JSON: {error}; try a JSON checker") from None
    if not isinstance(document, dict):
        raise UserError(f'spec {path} is not a JSON object; try {{"kind": "train", ...}}')
    return accept(document)


def accept(document: Mapping[str, Any]) -> TrainingRun:
    """Check a spec's document. Raises UserError with one line a problem."""
    try:
        spec = RunSpec.from_dict(document)
    except ValidationError as error:
        raise _refused(problems_of(error)) from None
    found = list(_unsupported(spec))
    if not found:
        found = spec_problems(spec)
    if found:
        raise _refused(found)
    model, plan, train = spec.shape, spec.plan, spec.train
    assert model is not None and isinstance(plan, ParallelPlan) and train is not None
    return TrainingRun(spec, model, plan, train)


def _refused(found: list[Problem]) -> UserError:
    return UserError("\n".join(str(item) for item in found))


def _unsupported(spec: RunSpec) -> Iterator[Problem]:
    if spec.kind != "train" or spec.train is None:
        yield problem("kind", f"the training engine runs kind train, this is {spec.kind}", "kind train")
        return
    if isinstance(spec.plan, str):
        yield problem("plan", "the engine alone does not choose a plan", "numbers, or submit to the planner")
        return
    if spec.shape is None:
        yield problem("model", "this engine version trains from a shape, not from existing weights", "a preset's name")
    else:
        yield from _unsupported_model(spec.shape)
    yield from _unsupported_plan(spec.plan)
    yield from _unsupported_training(spec.train)


def _unsupported_model(model: ModelSpec) -> Iterator[Problem]:
    runs = "this engine version runs softmax attention without experts"
    if model.attention != "softmax":
        yield problem("model.attention", f"{runs}, {model.name} has attention {model.attention}", "softmax")
    if model.moe is not None:
        yield problem("model.moe", f"{runs}, {model.name} has {model.moe.experts} experts", "a dense model")


def _unsupported_plan(plan: ParallelPlan) -> Iterator[Problem]:
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(plan, axis) > 1:
            says = f"this engine version is data parallel only, {axis} is {getattr(plan, axis)}"
            yield problem(f"plan.{axis}", says, f"{axis} 1 and dp {plan.world_size}")
    wanted: dict[str, tuple[Any, ...]] = {
        "offload": ("none",),
        "recompute": ("none", "full"),
        "precision": ("fp32", "bf16"),
        "params_dtype": (None, "fp32"),
        "grad_dtype": (None, "fp32"),
        "reduce_dtype": (None, "fp32", "bf16") if plan.precision == "bf16" and plan.zero >= 2 else (None, "fp32"),
        "loss_scale": (None,),
        "max_live_params": (None,),
    }
    for field, known in wanted.items():
        value = getattr(plan, field)
        if value not in known:
            words = [str(item) for item in known if item is not None] or ["leaving it out"]
            yield problem(f"plan.{field}", f"this engine version does not run {field} {value}", " or ".join(words))
    if plan.dp_replicate not in (None, 1) and plan.zero < 2:
        says = f"zero {plan.zero} copies everything already"
        yield problem("plan.dp_replicate", says, "zero 2 or 3, or dp_replicate 1")


def _unsupported_training(train: TrainBody) -> Iterator[Problem]:
    if train.objective != "pretrain":
        yield problem("train.objective", f"this engine version does not train by {train.objective}", "pretrain")
    if train.optimizer.name not in ("adamw", "sgd"):
        says = f"this engine version does not have {train.optimizer.name}"
        yield problem("train.optimizer.name", says, "adamw or sgd")
    for field in ("init_from", "adapter"):
        if getattr(train, field) is not None:
            yield problem(f"train.{field}", f"this engine version trains from scratch, without {field}", "leave it out")
    if train.compile:
        yield problem("train.compile", "this engine version runs eagerly", "compile false")
