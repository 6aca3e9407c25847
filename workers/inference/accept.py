"""From a spec file to a generate run that this engine can do: read, checked, and refused by sentences where it cannot.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.contracts.bodies import GenerateBody
from workers.contracts.exits import UserError
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec, spec_problems
from workers.contracts.spec_file import read_document, read_spec, refused

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class GenerateRun:
    """A spec whose parts are all known."""

    spec: RunSpec
    body: GenerateBody
    plan: ParallelPlan


def load_run(path: Path) -> GenerateRun:
    """Read and check a spec file. Raises UserError with one line a problem."""
    spec = read_spec(read_document(path, "generate"))
    if spec.kind != "generate" or spec.generate is None:
        raise UserError(f"kind: this engine version runs kind generate, this is {spec.kind}; try kind generate")
    if found := spec_problems(spec):
        raise refused(found)
    return GenerateRun(spec, spec.generate, _plan(spec, spec.generate))


def _plan(spec: RunSpec, body: GenerateBody) -> ParallelPlan:
    if not isinstance(spec.plan, ParallelPlan):
        raise UserError("plan: the engine alone does not choose a plan; try leaving it out")
    if spec.plan.world_size > 1:
        says = f"this engine version generates on one device, the plan has {spec.plan.world_size}"
        raise UserError(f"plan: {says}; try dp 1, tp 1, pp 1 and cp 1")
    if spec.plan.precision not in PRECISIONS:
        says = f"this engine version does not generate in {spec.plan.precision}"
        raise UserError(f"plan.precision: {says}; try {' or '.join(PRECISIONS)}")
    for field in ("draft", "quantize"):
        if getattr(body, field) is not None:
            raise UserError(f"generate.{field}: this engine version generates without; try leaving it out")
    return spec.plan
