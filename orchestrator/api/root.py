"""The REST API: routers under /api/v1/, the OpenAPI document and its documentation page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.urls import URLPattern, URLResolver
from ninja import NinjaAPI
from ninja.errors import ValidationErrorContext
from ninja.openapi.docs import Swagger
from ninja.operation import Operation

from orchestrator.api import (
    alerts,
    audit,
    benchmarks,
    calibrations,
    dashboards,
    data,
    datasets,
    dead_letters,
    device_history,
    engines,
    events,
    experiments,
    exports,
    finetuning,
    inference,
    ingest,
    jobs,
    me,
    model_comparisons,
    nodes,
    notifications,
    panels,
    plan_trials,
    plans,
    presets,
    produced,
    queue,
    reports,
    reviews,
    run_table,
    runs,
    series,
    serving_simulations,
    simulations,
    storage,
    sweeps,
    teams,
    tokens,
    tracking,
    usage,
    windows,
)
from orchestrator.api.http import middleware, openapi, problems
from orchestrator.api.http.auth import require_scope
from orchestrator.api.http.body_parser import BodyParser
from workers.contracts.base import validation_problems

DESCRIPTION = """
Orrery plans, launches and watches the training and serving of large language models.

Send `Authorization: Bearer TOKEN`; the page Tokens creates one. Lists take `limit` (at most 200)
and `cursor`, and return `{items, next_cursor}`. Errors are problem details (RFC 9457) that say what
is wrong, with which value, and what to do next. A creating POST with an `Idempotency-Key` takes
effect once, however often it is sent. Times are ISO 8601 in UTC, sizes are bytes.
"""


class Api(NinjaAPI):
    """ninja's API with our middleware, validation errors and OpenAPI document."""

    @property
    def urls(self) -> tuple[list[URLResolver | URLPattern], str, str]:
        """The URL patterns, each behind the middleware."""
        patterns, app_name, namespace = super().urls
        return middleware.guard_all(patterns), app_name, namespace

    def validation_error_from_error_contexts(
        self, error_contexts: Sequence[ValidationErrorContext[Any]]
    ) -> Any:
        """One problem per wrong field; fields of a spec are named as in the spec: `plan.tp`."""
        wrong_fields = []
        for context in error_contexts:
            named = getattr(context.model, "__read_from_single_attr__", None)
            flat = getattr(context.model, "__ninja_flatten_map__", None) or {}
            groups = {f"{path[0]}." for path in flat.values() if len(path) > 1}
            for item in validation_problems(context.pydantic_validation_error):
                field = item.field
                for prefix in (f"{named}.", *groups, "spec."):
                    field = field.removeprefix(prefix)
                wrong_fields.append(
                    item.model_copy(update={"field": "body" if field == named else field})
                )
        return problems.Invalid(wrong_fields)

    def get_openapi_operation_id(self, operation: Operation) -> str:
        """`runs_run_create`: the name in generated clients, independent of packages."""
        module = operation.view_func.__module__.rpartition(".")[2]
        return f"{module}_{operation.view_func.__name__}"

    def get_openapi_schema(self, **kwargs: Any) -> Any:
        """ninja's document with problem responses, headers and contract schemas."""
        return openapi.complete_schema(super().get_openapi_schema(**kwargs))


api = Api(
    title="Orrery",
    version="1",
    description=DESCRIPTION,
    openapi_url="/v1/openapi.json",
    docs_url="/docs",
    docs=Swagger(settings={"persistAuthorization": True, "tryItOutEnabled": False}),
    urls_namespace="api",
    auth=require_scope("read"),
    parser=BodyParser(),
)
problems.install(api)
for _prefix, _router in (
    ("/v1/runs", runs.router),
    ("/v1/runs", run_table.router),
    ("/v1/run-views", run_table.views),
    ("/v1/runs", ingest.router),
    ("/v1/runs", tracking.router),
    ("/v1/runs", series.router),
    ("/v1/runs", benchmarks.router),
    ("/v1/runs", plan_trials.router),
    ("/v1/runs", inference.router),
    ("/v1/runs", finetuning.router),
    ("/v1/runs", produced.router),
    ("/v1/experiments", experiments.router),
    ("/v1/sweeps", sweeps.router),
    ("/v1/events", events.router),
    ("/v1/dead-letters", dead_letters.router),
    ("/v1/queue", queue.router),
    ("/v1", nodes.router),
    ("/v1", device_history.router),
    ("/v1/engines", engines.router),
    ("/v1/presets", presets.router),
    ("/v1/data", data.router),
    ("/v1/reviews", reviews.router),
    ("/v1/model-comparisons", model_comparisons.router),
    ("/v1/plans", plans.router),
    ("/v1/plans/serving", serving_simulations.router),
    ("/v1/calibrations", calibrations.router),
    ("/v1/device-types", calibrations.devices),
    ("/v1/me", me.router),
    ("/v1/tokens", tokens.router),
    ("/v1/teams", teams.router),
    ("/v1/audit", audit.router),
    ("/v1/exports", exports.router),
    ("/v1/datasets", datasets.router),
    ("/v1/simulations", simulations.router),
    ("/v1/windows", windows.router),
    ("/v1/jobs", jobs.router),
    ("/v1/storage", storage.router),
    ("/v1/usage", usage.router),
    ("/v1/notifications", notifications.router),
    ("/v1/dashboards", dashboards.router),
    ("/v1/panels", panels.router),
    ("/v1/reports", reports.router),
    ("/v1/alerts", alerts.router),
    ("/v1/alert-rules", alerts.rules),
):
    api.add_router(_prefix, _router)
