"""From a spec file to an inference run that this engine can do: read, checked, or refused by
sentences.

Pydantic and the standard library only, so that a wrong spec fails in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.contracts.specs.inference_support import inference_problems
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.specs.run_bodies import GenerateBody, ServeBody
from workers.contracts.specs.spec_file import read_document, read_spec, refused
from workers.contracts.wire.exits import UserError

KINDS = ("generate", "evaluate", "serve")


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A spec whose parts are all known; exactly the body of its kind is not None."""

    spec: RunSpec
    plan: ParallelPlan

    @property
    def generate(self) -> GenerateBody:
        assert self.spec.generate is not None
        return self.spec.generate

    @property
    def serve(self) -> ServeBody:
        assert self.spec.serve is not None
        return self.spec.serve


def load_run(path: Path) -> InferenceRun:
    """Read and check a spec file. Raises UserError with one line a problem."""
    spec = read_spec(read_document(path, "generate"))
    if spec.kind not in KINDS:
        raise UserError(
            f"kind: this engine runs {' and '.join(KINDS)}, this is {spec.kind}; try kind generate"
        )
    if found := [*spec_problems(spec), *inference_problems(spec)]:
        raise refused(found)
    assert isinstance(spec.plan, ParallelPlan)
    return InferenceRun(spec, spec.plan)
