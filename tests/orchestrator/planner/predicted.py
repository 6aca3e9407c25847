"""Shorthand for planner tests: a table of one plan, without commands or databases."""

from __future__ import annotations

from typing import Any

from orchestrator.planner.model.frameworks import framework
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import Table
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan


def request(
    model: str | ModelSpec,
    plan: dict[str, Any] | None = None,
    *,
    device: str = "h100-80g",
    seq_len: int = 2048,
    using: Any = "orrery",
) -> Request:
    """A request whose cluster has as many devices as the plan needs.

    `using` is a framework's name or its switches.
    """
    spec = preset(model) if isinstance(model, str) else model
    laid = ParallelPlan.model_validate(plan or {})
    each = min(8, laid.world_size)
    cluster = ClusterSpec(device=device, nodes=-(-laid.world_size // each), devices_per_node=each)
    return Request(spec, laid, cluster, seq_len, framework(using))


def predicted(model: str | ModelSpec, plan: dict[str, Any] | None = None, **more: Any) -> Table:
    """A table of one row with every pipeline rank."""
    request_list = [request(model, plan, **more)]
    return table_of(request_list, columns_for(request_list))
