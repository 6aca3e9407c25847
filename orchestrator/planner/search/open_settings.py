"""Settings that a request leaves open: the best legal choice or the engine's default, and its cost.

A plan leaves `micro_batch_size` or `virtual_stages` open with null. Switches that change an
engine's time and are not given count at the engine's documented default. Both widen the interval.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import orchestrator.planner.model.all_terms  # noqa: F401  registers the terms
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.search.axes import divisors
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan

OPEN = ("micro_batch_size", "virtual_stages")
_LABELS = {"micro_batch_size": "micro-batch", "virtual_stages": "virtual stages"}
_Z80 = 1.2816
_MOST_SEQUENCES, _MOST_STAGES = 64, 8


@dataclass(frozen=True)
class _Default:
    """A switch of an engine, its default as text, and the log error if it is unknown."""

    switch: str
    text: str
    spread: float


# torchtitan, torchtitan/config: compile.enable, parallelism.enable_async_tensor_parallel and
# activation checkpointing's per-op option are its defaults; spreads from its own benchmark tables
_DEFAULTS: dict[str, tuple[_Default, ...]] = {
    "fsdp2": (
        _Default("compile", "layers are not compiled", 0.06),
        _Default("async_tp", "asynchronous tensor parallelism is off", 0.05),
        _Default("selective", "selective recompute saves every second product", 0.02),
        _Default("fp8_recipe", "fp8 scales are per tensor", 0.10),
    ),
}


def settle(request: Request, names: Collection[str], given: Any = None) -> Request:
    """The request with its open settings decided; `given` is the request's framework field.

    `names` are the open fields of the plan. `assumed` says what was chosen, and `open_spread` adds
    the log error of not knowing it.
    """
    if names:
        request = _best_choice(request, names)
    return _with_defaults(request, given if isinstance(given, Mapping) else {})


def _best_choice(request: Request, names: Collection[str]) -> Request:
    """The fastest legal choice that fits, or the one with the least memory.

    The spread is the log distance to the median of the choices that fit.
    """
    choices = _choices(request.plan, names, request)
    if not choices:
        return request
    requests = [replace(request, plan=plan) for plan in choices]
    table = table_of(requests, columns_for(requests))
    times, fits = table.column("step_time_s"), table.column("fits").astype(bool)
    size = table.column("total_bytes")
    best = int(np.where(fits, times, np.inf).argmin()) if fits.any() else int(size.argmin())
    likely = times[fits] if fits.any() else times
    spread = float(abs(np.log(np.median(likely) / times[best]))) / _Z80
    plan = choices[best]
    chosen = ", ".join(f"{_LABELS[name]} {getattr(plan, name)}" for name in OPEN if name in names)
    which = "fastest of" if fits.any() else "smallest of"
    text = f"Not stated: {chosen}, the {which} {len(choices)} legal choices, is used."
    return replace(
        request,
        plan=plan,
        assumed=(*request.assumed, text),
        open_spread=math.hypot(request.open_spread, spread),
    )


def _with_defaults(request: Request, given: Mapping[str, Any]) -> Request:
    """The request with what its engine's defaults decide."""
    plan = request.plan
    matters = {
        "compile": True,
        "async_tp": plan.tp > 1,
        "selective": plan.recompute == "selective",
        "fp8_recipe": plan.precision == "fp8",
    }
    used = [
        each
        for each in _DEFAULTS.get(request.framework.name, ())
        if matters[each.switch] and given.get(each.switch) is None
    ]
    if not used or request.entry.kind == "cpu":
        return request
    text = "; ".join(each.text for each in used)
    spread = math.hypot(request.open_spread, *(each.spread for each in used))
    sentence = f"Not stated, so the engine's default counts: {text}."
    return replace(request, assumed=(*request.assumed, sentence), open_spread=spread)


def _choices(plan: ParallelPlan, names: Collection[str], request: Request) -> list[ParallelPlan]:
    share = max(1, plan.global_batch_size // plan.dp)
    sizes: list[int] = [plan.micro_batch_size]
    if "micro_batch_size" in names:
        sizes = [each for each in divisors(share) if each <= _MOST_SEQUENCES]
    stages: list[int] = [plan.virtual_stages]
    if "virtual_stages" in names and plan.schedule in ("interleaved_1f1b", "zb1p") and plan.pp > 1:
        stages = list(range(2, max(2, min(_MOST_STAGES, request.model.layers // plan.pp)) + 1))
    legal = []
    for size in sizes:
        for virtual in stages:
            update = {"micro_batch_size": size, "virtual_stages": virtual}
            candidate = plan.model_copy(update=update)
            problems = plan_problems(
                candidate,
                model=request.model,
                seq_len=request.seq_len,
                devices=request.cluster.devices,
            )
            if not problems:
                legal.append(candidate)
    return legal
