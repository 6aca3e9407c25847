"""From a spec file to an inference run that this engine can do: read, checked, or refused by sentences.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.contracts.base import Contract
from workers.contracts.bodies import GenerateBody
from workers.contracts.exits import UserError
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec, spec_problems
from workers.contracts.spec_file import read_document, read_spec, refused

KINDS = ("generate",)
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A spec whose parts are all known; exactly the body of its kind is not None."""

    spec: RunSpec
    plan: ParallelPlan

    @property
    def generate(self) -> GenerateBody:
        assert self.spec.generate is not None
        return self.spec.generate


def load_run(path: Path) -> InferenceRun:
    """Read and check a spec file. Raises UserError with one line a problem."""
    spec = read_spec(read_document(path, "generate"))
    if spec.kind not in KINDS:
        raise UserError(f"kind: this engine runs {' and '.join(KINDS)}, this is {spec.kind}; try kind generate")
    if found := spec_problems(spec):
        raise refused(found)
    return InferenceRun(spec, _plan(spec, spec.body))


def _plan(spec: RunSpec, body: Contract) -> ParallelPlan:
    if not isinstance(spec.plan, ParallelPlan):
        raise UserError("plan: the engine alone does not choose a plan; try leaving it out")
    if spec.plan.world_size > 1:
        says = f"this engine version infers on one device, the plan has {spec.plan.world_size}"
        raise UserError(f"plan: {says}; try dp 1, tp 1, pp 1 and cp 1")
    if spec.plan.precision not in PRECISIONS:
        says = f"this engine version does not infer in {spec.plan.precision}"
        raise UserError(f"plan.precision: {says}; try {' or '.join(PRECISIONS)}")
    for field in ("draft", "quantize"):
        if getattr(body, field, None) is not None:
            raise UserError(f"{spec.kind}.{field}: this engine version does without; try leaving it out")
    return spec.plan
