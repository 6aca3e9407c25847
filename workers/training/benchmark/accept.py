"""Loads a benchmark from a spec file: reads, checks and expands it, or rejects it with messages.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.contracts.specs.benchmarks.techniques import (
    as_training,
    repeat_count,
    steps_per_repeat,
)
from workers.contracts.specs.benchmarks.variants import Expansion, Variant, expand
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.train import BenchmarkBody
from workers.runtime.exit_codes import UserError
from workers.runtime.spec_loading import parse_spec, read_document
from workers.training.setup.spec_loading import TrainingRun, refuse_problems


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """`base` is one repeat of the base plan as a training run."""

    spec: RunSpec
    body: BenchmarkBody
    base: TrainingRun
    expansion: Expansion

    def training_run(self, variant: Variant) -> TrainingRun:
        """One repeat of a variant as a training run."""
        spec = as_training(self.spec, variant.plan, compiled=variant.compiled, fused=variant.fused)
        assert spec.train is not None
        return TrainingRun(spec, self.base.model, variant.plan, spec.train)

    def describe(self) -> dict[str, Any]:
        """What `--print` and the event `benchmark_began` contain."""
        return {
            "variants": [
                {"id": each.id, "technique": each.technique, "name": each.name}
                for each in self.expansion.variants
            ],
            "left_out": self.expansion.left_out,
            "devices": self.expansion.devices,
            "turns": repeat_count(self.body),
            "turn_steps": steps_per_repeat(self.body),
            "warmup_steps": self.body.warmup_steps,
        }


def load_benchmark(path: Path) -> BenchmarkRun:
    """Read and check a spec file. Raises UserError with one line per problem."""
    return accept_benchmark(read_document(path, "benchmark"))


def accept_benchmark(document: Mapping[str, Any]) -> BenchmarkRun:
    """Check a spec's document. Raises UserError with one line per problem."""
    spec = parse_spec(document)
    if spec.benchmark is None:
        raise UserError(
            f"kind: this program runs kind benchmark, this is {spec.kind}. "
            "Use workers.training.main."
        )
    refuse_problems(spec)
    training, plan = as_training(spec), spec.plan
    assert (
        isinstance(plan, ParallelPlan) and training.train is not None and training.shape is not None
    )
    base = TrainingRun(training, training.shape, plan, training.train)
    return BenchmarkRun(spec, spec.benchmark, base, expand(spec))
