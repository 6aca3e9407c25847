"""Serving estimates: memory, latency, throughput by batch size, speculative decoding.

Does not depend on how terms are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from orchestrator.planner.model.terms import Table, explain
from orchestrator.planner.serving.all_terms import SERVING
from orchestrator.planner.serving.request import ServingRequest
from workers.contracts.base import validation_problems
from workers.contracts.catalog.units import GIB

MAX_DEFAULT_BATCH = 256  # a request may set a larger batch
NUMBERS = (
    "ttft_s",
    "tpot_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "prompt_share",
    "usd_per_million_tokens",
    "kv_bytes_per_token",
    "kv_bytes_per_sequence",
    "max_concurrency",
    "crossover_batch",
)
MEMORY = (
    "weights_bytes_per_device",
    "kv_bytes_per_sequence_device",
    "activations_bytes",
    "reserved_bytes",
    "kv_room_bytes",
    "total_bytes",
    "capacity_bytes",
)


def serving(fields: Mapping[str, Any], *, explained: bool = False) -> dict[str, Any]:
    """Answer `{ok, problems, fits, batch, ttft_s, …, memory, speculative?, curve}`.

    Seconds, bytes, tokens/s of all replicas together; `curve` is a list of `{batch, …}`.
    `explained`: each number is the tree of its formula.
    """
    try:
        request = ServingRequest.model_validate(dict(fields))
    except ValidationError as error:
        return {"ok": False, "problems": [item.to_dict() for item in validation_problems(error)]}
    if problems := request.problems():
        return {"ok": False, "problems": [item.to_dict() for item in problems]}
    columns = request.columns()
    minimal = Table({**columns, "batch": request.replicas}, 1, SERVING)
    concurrency = float(minimal["max_concurrency"])
    batch = request.batch or int(max(request.replicas, min(concurrency, MAX_DEFAULT_BATCH)))
    table = Table({**columns, "batch": float(batch)}, 1, SERVING)

    def shown(name: str) -> Any:
        return explain(table, name).to_dict() if explained else _plain(name, table[name])

    answer: dict[str, Any] = {
        "ok": True,
        "problems": [],
        "fits": bool(table["fits"]),
        "batch": batch,
        "devices": request.devices,
        **{name: shown(name) for name in NUMBERS},
        "memory": {name: shown(name) for name in MEMORY},
        "bound": _bound(table),
        "notes": [*request.notes(), _throughput_note(table, batch)],
        "curve": _curve(columns, request, concurrency),
    }
    if not answer["fits"]:
        answer["suggestions"] = _advice(request, table)
    if request.acceptance is not None:
        answer["speculative"] = _speculative(table, request, explained)
    return answer


def _plain(name: str, value: Any) -> float | int:
    """Bytes and sequences are whole."""
    number = float(value)
    return (
        round(number)
        if ("_bytes" in name or name == "max_concurrency") and math.isfinite(number)
        else number
    )


def _throughput_note(table: Table, batch: int) -> str:
    """Why tokens/s is below batch over time per token."""
    seconds, share = float(table["tpot_s"]), float(table["prompt_share"])
    sequences = "sequence" if batch == 1 else "sequences"
    return (
        f"{batch} {sequences} at {1e3 * seconds:.3g} ms per token give {batch / seconds:,.0f} "
        f"tokens/s while all decode. Prompts take {share:.0%} of the time, which leaves "
        f"{float(table['tokens_per_s']):,.0f} tokens/s."
    )


def _bound(table: Table) -> str:
    """The bottleneck of a decode step."""
    parts = {
        "memory bandwidth": float(table["decode_memory_s"]),
        "compute": float(table["decode_compute_s"]),
        "communication": float(table["decode_comm_s"]),
        "launches": float(table["layers"] * table["launch_s_per_layer"]),
    }
    return max(parts, key=lambda name: parts[name])


def _curve(
    columns: dict[str, Any], request: ServingRequest, concurrency: float
) -> list[dict[str, Any]]:
    """Throughput and latency over batch sizes, up to the largest that fits."""
    max_batch = max(request.replicas, int(min(concurrency, 4096)))
    steps = np.unique(np.geomspace(request.replicas, max_batch, 16).round().astype(int))
    table = Table({**columns, "batch": steps.astype(float)}, len(steps), SERVING)
    names = ("ttft_s", "tpot_s", "tokens_per_s", "total_bytes")
    values = {name: table.column(name) for name in names}
    return [
        {"batch": int(batch), **{name: _plain(name, values[name][index]) for name in names}}
        for index, batch in enumerate(steps)
    ]


def _speculative(table: Table, request: ServingRequest, explained: bool) -> dict[str, Any]:
    lengths = np.arange(1, 17) if request.draft_tokens is None else np.array([request.draft_tokens])
    candidates = table.with_columns({"draft_tokens": lengths.astype(float)})
    speedups = np.atleast_1d(candidates["speculative_speedup"])
    best = float(lengths[int(speedups.argmax())])
    chosen = table.with_columns({"draft_tokens": best})
    names = ("accepted_per_step", "speculative_speedup", "speculative_tpot_s")
    numbers = {
        name: explain(chosen, name).to_dict() if explained else float(chosen[name])
        for name in names
    }
    return {"draft_tokens": int(best), "pays": bool(speedups.max() > 1), **numbers}


def _advice(request: ServingRequest, table: Table) -> list[str]:
    """Single changes with which the request fits, smallest first."""
    weights, room = float(table["weights_bytes_per_device"]), float(table["kv_room_bytes"])
    suggestions = []
    if room > float(table["kv_bytes_per_sequence_device"]):
        suggestions.append(f"batch {int(float(table['max_concurrency']))}")
    for quantize in ("fp8", "int8", "int4"):
        smaller = request.model_copy(update={"quantize": quantize})
        if smaller.columns()["weight_bytes_each"] < table["weight_bytes_each"] and _fits(smaller):
            suggestions.append(f"quantize {quantize}")
            break
    for tp in (2, 4, 8, 16):
        wider = request.model_copy(update={"tp": request.tp * tp})
        if not wider.problems() and _fits(wider):
            suggestions.append(f"tp {wider.tp}")
            break
    gib = math.ceil(weights * request.tp * request.pp / GIB)
    return suggestions or [f"more or larger devices: the weights alone need {gib} GiB"]


def _fits(request: ServingRequest) -> bool:
    batch = float(request.batch or request.replicas)
    return bool(Table({**request.columns(), "batch": batch}, 1, SERVING)["fits"])
