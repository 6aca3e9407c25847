"""Types of planner requests: scenario, workload, parsed line, parse options, and the refusal.

Does not depend on Django, formulas or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from orchestrator.planner.model.frameworks import Framework
from orchestrator.planner.model.inputs import Request
from workers.contracts.base import Contract, Problem
from workers.contracts.catalog.devices import Device
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec, Positive
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import TrainBody


class BadRequest(ValueError):
    """A request that cannot be answered; `problems` name each wrong field."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(item) for item in problems))


class Workload(Contract):
    """Training work: sequence length, sequences per step (for a search), tokens in total.

    `trained_share` of the positions have a token with loss: where only their logits are computed,
    the others need no memory for them.
    """

    seq_len: Positive
    global_batch_size: Positive | None = None
    tokens: Annotated[float, Field(gt=0)] | None = None
    trained_share: Annotated[float, Field(gt=0, le=1)] = 1.0


@dataclass(frozen=True)
class Scenario:
    """A request without its plan: what a search or "auto" chooses a plan for.

    `device` replaces the cluster's catalogue entry if it is set. `train` says what is frozen or
    added, `second` is the shape of a teacher.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    framework: Framework
    device: Device | None = None
    train: TrainBody | None = None
    second: ModelSpec | None = None

    def request(self, plan: ParallelPlan, id: str = "") -> Request:
        """The request for one plan in this scenario."""
        return Request(
            self.model,
            plan,
            self.cluster,
            self.workload.seq_len,
            self.framework,
            self.workload.tokens,
            id,
            self.device,
            self.train,
            self.second,
            trained_share=self.workload.trained_share,
        )


@dataclass(frozen=True)
class ParsedLine:
    """One parsed request line. `request` is None if there are `problems`; `id` is returned as is.

    `illegal` distinguishes a readable but illegal plan from a line that cannot be read.
    """

    id: Any = None
    request: Request | None = None
    problems: list[Problem] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    illegal: bool = False


@dataclass(frozen=True)
class ParseOptions:
    """What lines may name besides the catalogue: own `devices` by name, and `files` if allowed."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    files: bool = False
