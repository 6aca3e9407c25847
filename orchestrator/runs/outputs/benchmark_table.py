"""A benchmark's table of variants, from events, and its measurement lines for the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.planner.request_parsing import parse_line
from orchestrator.runs.models import Run, RunEvent
from workers.contracts import RunSpec
from workers.contracts.specs.benchmarks.variants import BASE

_TYPES = ("benchmark_began", "benchmark_result", "benchmark_collectives", "benchmark_products")
_OF_TRAINING = ("compile", "fused_kernels")  # differ from the base in settings outside the plan
_MEASURED = ("step_time_s", "peak_bytes", "samples_per_s", "tokens_per_s")


def benchmark_of(*, run: Run) -> dict[str, Any]:
    """`{rows, left_out, devices, turns, warmup_steps, collectives, products}` so far.

    A row is `{id, technique, name, state: waiting | measured | failed, message?, plan?,
    step_time_s?, low_s?, high_s?, steps?, samples_per_s?, tokens_per_s?, mfu?, peak_bytes?,
    memory?,
    loss?, deviation?, against_base?}`. Seconds are the median and quartiles over timed steps,
    `deviation` the largest relative difference of a loss from the base's at the same step, and
    `against_base` ratios to the base by name. Rows of newer attempts replace older ones.
    """
    others: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    rows = (
        RunEvent.objects.filter(run=run, type__in=_TYPES)
        .order_by("seq")
        .values_list("type", "data")
    )
    for type_, data in rows:
        if type_ == "benchmark_result":
            if "says" in data:  # version 0.1 wrote `says`
                data["message"] = data.pop("says")
            results[str(data.get("id"))] = data
        else:
            others[type_] = data
    began = others.get("benchmark_began", {})
    waiting = {row["id"]: {**row, "state": "waiting"} for row in began.get("variants", [])}
    table = [dict(row) for row in {**waiting, **results}.values()]
    base = results.get(BASE, {})
    for row in table:
        if row["state"] == "measured" and base.get("state") == "measured":
            row["against_base"] = {
                name: row[name] / base[name] for name in _MEASURED if base.get(name)
            }
    return {
        "rows": table,
        "left_out": began.get("left_out", []),
        "devices": began.get("devices", []),
        "turns": began.get("turns"),
        "warmup_steps": began.get("warmup_steps"),
        "collectives": others.get("benchmark_collectives"),
        "products": others.get("benchmark_products"),
    }


def benchmark_lines(*, run: Run) -> list[dict[str, Any]] | str:
    """A measurement line per measured variant, for calibration; a message if there are none.

    The first line also has the measured links and matrix products. Variants without a planner
    formula (PipeDream's asynchronous updates, compiled blocks, unfused kernels) are skipped.
    """
    document = run.prediction
    if not document:
        return f"run {run.pk} has no prediction to compare with"
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
        if (
            document["device"] != "cpu"
        ):  # a CPU's peak is the sum of its tensors, not the process's peak
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
        if not parse_line(line).problems:
            lines.append(line)
    if not lines:
        return f"run {run.pk} has measured no variant yet"
    lines[0]["measured"] |= _device_measurements(table)
    return lines


def _device_measurements(table: Mapping[str, Any]) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    if link := (table["collectives"] or {}).get("link"):
        measured["link"] = link
    products = [
        row["tflops"]
        for row in (table["products"] or {}).get("rows", [])
        if row["precision"] == "bf16"
    ]
    if products:
        measured["gemm_tflops"] = max(products)
    return measured
