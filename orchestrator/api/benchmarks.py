"""GET runs/{id}/benchmark: the variants that a benchmark measured, collectives, matrix products."""

from __future__ import annotations

from typing import Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.problems import invalid
from orchestrator.runs.outputs.benchmark_table import benchmark_of

router = Router(tags=["runs"])


class BenchmarkRow(Schema):
    """One variant of a benchmark."""

    id: str
    technique: str
    name: str
    state: Literal["waiting", "measured", "failed"]
    message: str | None = Field(None, description="why it failed")
    plan: dict[str, Any] | None = None
    step_time_s: float | None = Field(None, description="median over all timed steps of all rounds")
    low_s: float | None = Field(None, description="first quartile")
    high_s: float | None = Field(None, description="third quartile")
    turns_s: list[float] | None = Field(None, description="median of each round")
    steps: int | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_bytes: float | None = Field(
        None, description="of the rank with the highest peak; on a CPU, the sum of its tensors"
    )
    memory: dict[str, float] | None = Field(None, description="bytes of that rank by category")
    loss: float | str | None = Field(None, description="at the last step of a round")
    deviation: float | str | None = Field(
        None, description="largest relative difference of a step's loss from the base"
    )
    against_base: dict[str, float] | None = Field(None, description="ratios to the base")


class BenchmarkOut(Schema):
    """The results of a benchmark run."""

    rows: list[BenchmarkRow]
    left_out: list[dict[str, str]] = Field(
        description="`{technique, name, reason}` of variants that are illegal"
    )
    devices: list[str]
    turns: int | None
    warmup_steps: int | None
    collectives: dict[str, Any] | None = Field(
        description="`{ranks, rows: [{kind, bytes, seconds, bus_bytes_per_s}], link}`"
    )
    products: dict[str, Any] | None = Field(
        description="`{rows: [{precision, size, seconds, tflops}]}`"
    )


@router.get(
    "/{int:id}/benchmark",
    response=BenchmarkOut,
    auth=require_scope("read"),
    summary="Get benchmark results",
)
def benchmark(request: HttpRequest, id: int) -> Any:
    """The measured variants. While the run continues, variants without result are `waiting`."""
    run = get_run(request, id)
    if run.kind != "benchmark":
        raise invalid("id", f"run {run.pk} is a {run.kind} run", "Use a run of kind benchmark.")
    return benchmark_of(run=run)
