"""Submits the evaluation that follows a fine-tuning run: its last checkpoint against its initial
weights.

Does not depend on why a run ends.
"""

from __future__ import annotations

from typing import Any

from orchestrator.common.errors import Refusal
from orchestrator.runs import events
from orchestrator.runs.models import Run
from orchestrator.runs.submission.submit import run_folder, run_submit
from workers.contracts.specs.inference_support import PRECISIONS

EVALUATION_SUBMITTED = "evaluation_submitted"


def evaluation_spec(spec: dict[str, Any], *, checkpoint: str, precision: str) -> dict[str, Any]:
    """The spec of an evaluate run of a checkpoint, with `train.evaluate` as its body."""
    train = spec.get("train") or {}
    body = {**(train.get("evaluate") or {}), "baseline": train.get("init_from")}
    data = (train.get("eval") or {}).get("data") or spec.get("data")
    return {
        "kind": "evaluate",
        "model": {"path": checkpoint},
        **({"data": data} if data else {}),
        "plan": {"precision": precision if precision in PRECISIONS else "bf16"},
        "evaluate": body,
    }


def evaluation_submit(*, run: Run) -> Run | None:
    """Submit the evaluation of a finished run; None without `train.evaluate`.

    A refusal is an event of the run: its training is complete.
    """
    train = run.spec.get("train") or {}
    if run.kind != "train" or train.get("evaluate") is None:
        return None
    checkpoint = f"{run_folder(run)}/checkpoints/step-{int(train['steps']):08d}"
    precision = str((run.plan or {}).get("precision", "fp32"))
    try:
        submitted = run_submit(
            owner=run.owner,
            name=f"evaluate {run.name}"[:160],
            spec=evaluation_spec(run.spec, checkpoint=checkpoint, precision=precision),
            experiment=run.experiment,
        )
    except Refusal as refusal:
        data: dict[str, Any] = {"message": refusal.detail}
        events.record(run=run, new=[events.NewEvent("evaluation_refused", data)])
        return None
    data = {"into": str(submitted.pk), "name": submitted.name}
    events.record(run=run, new=[events.NewEvent(EVALUATION_SUBMITTED, data)])
    return submitted
