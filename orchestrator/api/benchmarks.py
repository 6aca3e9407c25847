"""What a benchmark run measured: its table of variants, and the devices' own collectives and
products. Reads only.
"""

from __future__ import annotations

from typing import Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import needs
from orchestrator.api.http.lookup import run_of
from orchestrator.api.http.problems import invalid
from orchestrator.runs.outputs.benchmark_table import benchmark_of

router = Router(tags=["runs"])


class BenchmarkRow(Schema):
    id: str
    technique: str
    name: str
    state: Literal["waiting", "measured", "failed"]
    message: str | None = Field(None, description="why it failed")
    plan: dict[str, Any] | None = None
    step_time_s: float | None = Field(None, description="median over all timed steps of all turns")
    low_s: float | None = Field(None, description="first quartile")
    high_s: float | None = Field(None, description="third quartile")
    turns_s: list[float] | None = Field(None, description="median of each turn")
    steps: int | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_bytes: float | None = Field(
        None, description="fullest rank: the allocator's, or counted tensors on a CPU"
    )
    memory: dict[str, float] | None = Field(None, description="bytes by category of that rank")
    loss: float | str | None = Field(None, description="of a turn's last step")
    deviation: float | str | None = Field(
        None, description="largest relative difference of a step's loss to the base"
    )
    against_base: dict[str, float] | None = Field(None, description="ratios to the base")


class BenchmarkOut(Schema):
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
    auth=needs("read"),
    summary="What a benchmark measured",
)
def benchmark(request: HttpRequest, id: int) -> Any:
    """Grows while the run goes on: variants that were not reached are `waiting`."""
    run = run_of(request, id)
    if run.kind != "benchmark":
        raise invalid("id", f"run {run.pk} is a {run.kind} run", "a run of kind benchmark")
    return benchmark_of(run=run)
