"""Contracts of control plane, nodes and users: specs, plans, presets, devices, points, messages.

Pydantic and the standard library only. `CONTRACT_VERSION` names the wire format.
"""

from workers.contracts.base import CONTRACT_VERSION, Contract, Problem, validation_problems
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.wire.points import Point, RunEvent

__all__ = [
    "CONTRACT_VERSION",
    "ClusterSpec",
    "Contract",
    "ModelSource",
    "ModelSpec",
    "ParallelPlan",
    "Point",
    "Problem",
    "RunEvent",
    "RunSpec",
    "plan_problems",
    "spec_problems",
    "validation_problems",
]
