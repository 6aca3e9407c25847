"""From a spec file to a benchmark this engine can do: read, checked, expanded, and refused by sentences.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import problems_of
from workers.contracts.benchmark import as_training, turn_steps, turns
from workers.contracts.bodies import BenchmarkBody
from workers.contracts.engine import engine_problems
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec, spec_problems
from workers.contracts.variants import Expansion, Variant, expand
from workers.training.accept import TrainingRun
from workers.training.exits import UserError


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """`base` is one turn of the base plan as a training run; `run_of` one of a variant."""

    spec: RunSpec
    body: BenchmarkBody
    base: TrainingRun
    expansion: Expansion

    def run_of(self, variant: Variant) -> TrainingRun:
        return TrainingRun(as_training(self.spec, variant.plan), self.base.model, variant.plan, self.base.train)

    def describe(self) -> dict[str, Any]:
        """What `--print` shows, and what an event says at the beginning."""
        return {
            "variants": [
                {"id": each.id, "technique": each.technique, "name": each.name} for each in self.expansion.variants
            ],
            "left_out": self.expansion.left_out,
            "devices": self.expansion.devices,
            "turns": turns(self.body),
            "turn_steps": turn_steps(self.body),
            "warmup_steps": self.body.warmup_steps,
        }


def load_benchmark(path: Path) -> BenchmarkRun:
    """Read and check a spec file. Raises UserError with one line a problem."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"spec {path} cannot be read: {error}; try --spec with a JSON file") from None
    if not isinstance(document, dict):
        raise UserError(f'spec {path} is not a JSON object; try {{"kind": "benchmark", ...}}')
    return accept_benchmark(document)


def accept_benchmark(document: Mapping[str, Any]) -> BenchmarkRun:
    """Check a spec's document. Raises UserError with one line a problem."""
    try:
        spec = RunSpec.from_dict(document)
    except ValidationError as error:
        raise UserError("\n".join(str(item) for item in problems_of(error))) from None
    if spec.benchmark is None:
        raise UserError(f"kind: this program runs kind benchmark, this is {spec.kind}; try workers.training.main")
    found = engine_problems(spec) or spec_problems(spec)
    if found:
        raise UserError("\n".join(str(item) for item in found))
    training, plan = as_training(spec), spec.plan
    assert isinstance(plan, ParallelPlan) and training.train is not None and training.shape is not None
    base = TrainingRun(training, training.shape, plan, training.train)
    return BenchmarkRun(spec, spec.benchmark, base, expand(spec))
