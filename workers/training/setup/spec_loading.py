"""From a spec file to a run this engine can do: read, checked, and refused by sentences where it
cannot.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second; torch
is loaded if the model's shape is that of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.model_flops import training_flops_per_token
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.specs.train import TrainBody
from workers.contracts.specs.training_support import engine_problems
from workers.runtime.exit_codes import UserError
from workers.runtime.spec_loading import parse_spec, raise_problems, read_document


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A spec whose parts are all known: nothing is left to be chosen.

    `model` is the shape that is trained, a reward model's with its scalar head.
    """

    spec: RunSpec
    model: ModelSpec
    plan: ParallelPlan
    train: TrainBody

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
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
            "flops_per_token": training_flops_per_token(self.model, self.train),
        }


def mesh_axes(plan: ParallelPlan) -> dict[str, int]:
    """Axis names and sizes of the device mesh, outer to inner; data parallel ones always, others
    where above 1.
    """
    data = {"dp": plan.dp}
    if plan.zero >= 2:
        data = {"dp_replicate": plan.dp_replicate or 1, "dp_shard": plan.dp_shard}
    outer = {"pp": plan.pp} if plan.pp > 1 else {}
    return (
        outer | data | {name: size for name, size in (("cp", plan.cp), ("tp", plan.tp)) if size > 1}
    )


def load_run(path: Path) -> TrainingRun:
    """Read and check a spec file. Raises UserError with one line a problem."""
    return accept(read_document(path, "train"))


def accept(document: Mapping[str, Any]) -> TrainingRun:
    """Check a spec's document. Raises UserError with one line a problem."""
    spec = with_shape(parse_spec(document))
    refuse_problems(spec)
    model, plan, train = spec.trained_shape, spec.plan, spec.train
    assert model is not None and isinstance(plan, ParallelPlan) and train is not None
    return TrainingRun(spec, model, plan, train)


def with_shape(spec: RunSpec) -> RunSpec:
    """The spec with the shape of its weights as model, if it names no other.

    Raises UserError if the weights cannot be read.
    """
    source = spec.shape_source
    if source is None or spec.kind != "train":
        return spec
    # opening weights loads torch
    from workers.models.errors import WeightsError
    from workers.models.weights.open import open_source

    field = "model" if isinstance(spec.model, ModelSource) else "train.init_from"
    try:
        return spec.model_copy(update={"model": open_source(source).spec})
    except WeightsError as error:
        raise UserError(f"{field}: {error}") from None


def refuse_problems(spec: RunSpec) -> None:
    """Raises UserError with one line for each thing that this engine, or any, cannot do."""
    raise_problems(engine_problems(spec) or spec_problems(spec))
