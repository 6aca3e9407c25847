"""A benchmark's table: rows of its variants beside the base, from the events that its ranks told.

Reads events; knows no formula. What was measured becomes lines that the planner calibrates by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.planner.requests import read
from orchestrator.runs.models import Run, RunEvent
from workers.contracts import RunSpec
from workers.contracts.specs.benchmark_variants import BASE

_TYPES = ("benchmark_began", "benchmark_result", "benchmark_collectives", "benchmark_products")
_OF_TRAINING = ("compile", "fused_kernels")  # differ from the base in what the plan does not say
_MEASURED = ("step_time_s", "peak_bytes", "samples_per_s", "tokens_per_s")


def benchmark_of(*, run: Run) -> dict[str, Any]:
    """`{rows, left_out, devices, turns, warmup_steps, collectives, products}` as far as it is told
    by now.

    A row is `{id, technique, name, state: waiting | measured | failed, says?, plan?, step_time_s?, low_s?, high_s?,
    steps?, samples_per_s?, tokens_per_s?, mfu?, peak_bytes?, memory?, loss?, deviation?,
    against_base?}`: seconds are
    the median and quartiles over timed steps, `deviation` the largest relative difference of a loss
    to the base's at
    the same step, `against_base` ratios to the base by name. Newer attempts' rows replace older
    ones'.
    """
    told: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    rows = (
        RunEvent.objects.filter(run=run, type__in=_TYPES)
        .order_by("seq")
        .values_list("type", "data")
    )
    for type_, data in rows:
        if type_ == "benchmark_result":
            results[str(data.get("id"))] = data
        else:
            told[type_] = data
    began = told.get("benchmark_began", {})
    named = {each["id"]: {**each, "state": "waiting"} for each in began.get("variants", [])}
    found = [dict(each) for each in {**named, **results}.values()]
    base = results.get(BASE, {})
    for each in found:
        if each["state"] == "measured" and base.get("state") == "measured":
            each["against_base"] = {
                name: each[name] / base[name] for name in _MEASURED if base.get(name)
            }
    return {
        "rows": found,
        "left_out": began.get("left_out", []),
        "devices": began.get("devices", []),
        "turns": began.get("turns"),
        "warmup_steps": began.get("warmup_steps"),
        "collectives": told.get("benchmark_collectives"),
        "products": told.get("benchmark_products"),
    }


def benchmark_lines(*, run: Run) -> list[dict[str, Any]] | str:
    """Every measured variant as a measurement line to calibrate with, or why there is none, in a
    sentence.

    The first line carries what was measured of links and matrix products. Variants that the planner
    has no formula for
    (PipeDream's asynchronous updates, compiled blocks, formulas step by step) are left out.
    """
    document = run.prediction
    if not document:
        return f"run {run.pk} has no prediction to be measured against"
    spec = RunSpec.from_dict(run.spec)
    assert spec.benchmark is not None and spec.shape is not None
    table = benchmark_of(run=run)
    lines: list[dict[str, Any]] = []
    for row in table["rows"]:
        if row["state"] != "measured" or row["technique"] in _OF_TRAINING:
            continue
        if row["plan"].get("schedule") == "pipedream":
            continue
        numbers: dict[str, Any] = {"step_time_s": row["step_time_s"]}
        if document["device"] != "cpu":  # a CPU's is a count of tensors, not the process's peak
            numbers["peak_bytes"] = row["peak_bytes"]
        line = {
            "id": f"run-{run.pk} {row['id']}",
            "model": spec.shape.to_dict(),
            "plan": row["plan"],
            "cluster": document["cluster"],
            "workload": {"seq_len": spec.benchmark.seq_len},
            "framework": document["framework"],
            "source": f"run {run.pk}, {row['id']}",
            "measured": numbers,
        }
        if not read(line).problems:
            lines.append(line)
    if not lines:
        return f"run {run.pk} has measured no variant yet"
    lines[0]["measured"] |= _of_devices(table)
    return lines


def _of_devices(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if link := (table["collectives"] or {}).get("link"):
        found["link"] = link
    products = [
        each["tflops"]
        for each in (table["products"] or {}).get("rows", [])
        if each["precision"] == "bf16"
    ]
    if products:
        found["gemm_tflops"] = max(products)
    return found
