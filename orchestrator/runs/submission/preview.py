"""Problems and preview of a spec in a form; writes nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.accounts.models import User
from orchestrator.runs.outputs import produce_servers
from orchestrator.runs.outputs.produce_estimate import estimate_produce
from orchestrator.runs.submission.check import check
from orchestrator.runs.submission.device_numbers.elastic_sizes import allowed_sizes
from orchestrator.runs.submission.weights import teacher_shape


def spec_problem_list(spec: Any, *, by: User | None = None) -> list[dict[str, str]]:
    """`[{field, message, hint}]` for a spec in a form; empty if it can be submitted."""
    result = check(spec, by=by)
    return [
        {"field": item.field, "message": item.message, "hint": item.hint}
        for item in (*result.problems, *result.unsupported)
    ]


def spec_preview(spec: Any, *, by: User | None = None) -> dict[str, Any]:
    """The preview of a spec in a form; writes nothing.

    `{problems, model, teacher, plan, automatic, how, prediction, fits, misfits, advice, trials,
    produce, sizes}`: `model` and `teacher` are shapes, `plan` is resolved, `how` explains it;
    `force` overrides `misfits`; `advice` lists single changes that would fit; `trials`
    {plans, seconds, budget_s} are those of a run with autotune, `produce` is the estimate of a
    produce run, `sizes` are those of an elastic run, `possible_sizes` the numbers of devices that
    `min_devices` could allow. Unknown parts are None.
    """
    result = check(spec, by=by)
    body = result.spec.produce if result.spec is not None and not result.problems else None
    plan = result.resolved.plan if result.resolved is not None else None
    shape = result.spec.shape if result.spec is not None else None
    teacher = teacher_shape(result.spec) if result.spec is not None else None
    return {
        "problems": [
            item.model_dump(by_alias=True) for item in (*result.problems, *result.unsupported)
        ],
        "model": shape.to_dict() if shape is not None else None,
        "teacher": teacher.to_dict() if teacher is not None else None,
        "plan": plan.to_dict() if plan is not None else None,
        "automatic": result.resolved.automatic if result.resolved is not None else None,
        "how": result.resolved.how if result.resolved is not None else None,
        "prediction": result.prediction.document if result.prediction is not None else None,
        "fits": result.prediction.fits if result.prediction is not None else None,
        "trials": {
            "plans": len(result.candidates.plans),
            "seconds": result.candidates.seconds,
            "budget_s": result.candidates.budget_s,
        }
        if result.candidates.plans
        else None,
        "produce": asdict(
            estimate_produce(body, produce_servers.visible_server(body.server.run, by))
        )
        if body is not None
        else None,
        "misfits": [item.model_dump(by_alias=True) for item in result.misfits],
        "advice": [change.message for change in result.prediction.advice]
        if result.prediction is not None
        else [],
        "sizes": result.sizes,
        "possible_sizes": allowed_sizes(result.spec.model_copy(update={"plan": plan}))
        if result.spec is not None and result.spec.train is not None and plan is not None
        else [],
    }
