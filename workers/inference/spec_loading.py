"""Reads a spec file into an inference run that this engine can execute.

Pydantic and the standard library only, so a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.contracts.specs.inference import GenerateBody, ServeBody
from workers.contracts.specs.inference_support import inference_problems
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.runtime.exit_codes import UserError
from workers.runtime.spec_loading import parse_spec, raise_problems, read_document

KINDS = ("generate", "evaluate", "serve")


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A complete spec; exactly the body of its kind is not None."""

    spec: RunSpec
    plan: ParallelPlan

    @property
    def generate(self) -> GenerateBody:
        """The body of kind generate."""
        assert self.spec.generate is not None
        return self.spec.generate

    @property
    def serve(self) -> ServeBody:
        """The body of kind serve."""
        assert self.spec.serve is not None
        return self.spec.serve


def load_run(path: Path) -> InferenceRun:
    """Read and check a spec file. Raises UserError with one line per problem."""
    spec = parse_spec(read_document(path, "generate"))
    if spec.kind not in KINDS:
        raise UserError(
            f"kind: this engine runs {' and '.join(KINDS)}, this is {spec.kind}. Use kind generate."
        )
    raise_problems([*spec_problems(spec), *inference_problems(spec)])
    assert isinstance(spec.plan, ParallelPlan)
    return InferenceRun(spec, spec.plan)
