"""A serve run as a deployment that the planner can simulate, with its measured step costs."""

from __future__ import annotations

from typing import Any

from orchestrator.planner.plan_request import BadRequest
from orchestrator.runs.models import Run
from orchestrator.runs.outputs import endpoint
from orchestrator.runs.submission.target_hardware import target_hardware_for
from orchestrator.runs.submission.weights import shape_of
from workers.contracts import RunSpec
from workers.contracts.base import problem
from workers.contracts.specs.inference import ServeBody
from workers.contracts.specs.plan import ParallelPlan


def served_deployment(*, run: Run) -> dict[str, Any]:
    """Fields of a simulation request: model, cluster, layout, limits and `step_costs`.

    Raises BadRequest for runs of other kinds, and before a server has computed 50 steps.
    """
    spec = RunSpec.model_validate(run.spec) if run.kind == "serve" else None
    shape = None if spec is None else shape_of(spec.model)
    if spec is None or shape is None or not isinstance(spec.body, ServeBody):
        message = f"run {run.pk} does not serve a model of known shape"
        raise BadRequest([problem("run", message, "Use the id of a serve run.")])
    snapshot = endpoint.last_snapshot(run=run)
    state = endpoint.engine_state(run=run) or (snapshot.state if snapshot else None)
    if state is None or state.step_costs is None:
        message = f"run {run.pk} has no measured step costs: it has computed too few steps"
        raise BadRequest(
            [problem("run", message, "Send the server requests until it has run 50 steps.")]
        )
    plan = spec.plan if isinstance(spec.plan, ParallelPlan) else ParallelPlan()
    hardware = target_hardware_for(spec)
    fp32 = plan.precision == "fp32"
    return {
        "model": shape.to_dict(),
        "cluster": hardware.cluster(plan.world_size).to_dict(),
        "tp": plan.tp,
        "replicas": plan.dp,
        "quantize": spec.body.quantize or ("fp32" if fp32 else "none"),
        "max_batch_tokens": spec.body.max_batch_tokens,
        "max_seqs": spec.body.max_seqs,
        "kv_blocks": max(1, state.blocks // plan.dp),
        "block_size": state.block_size,
        "step_costs": state.step_costs.to_dict(),
    }
