"""The variants of a benchmark's base plan, and those that cannot be trained, with reasons.

Every variant has the base's ranks and global batch. Does not check memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import validation_problems
from workers.contracts.specs.benchmarks.techniques import (
    DEVICE_TECHNIQUES,
    as_training,
    repeat_count,
    selected_techniques,
    steps_per_repeat,
)
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import INTERLEAVED, SPLIT_BACKWARD, V_SHAPED, ParallelPlan
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.specs.training_support import engine_problems

BASE = "base"
# changes of the training instead of the plan
_COMPILED, _FUSED = "compiled", "fused"
_SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "pipedream")


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table; `name` describes the difference from the base."""

    technique: str
    name: str
    plan: ParallelPlan
    compiled: bool = False
    fused: bool = True

    @property
    def id(self) -> str:
        """`technique: name`, unique within a benchmark."""
        return BASE if self.technique == BASE else f"{self.technique}: {self.name}"


@dataclass(slots=True)
class Expansion:
    """All variants, the base first.

    `left_out`: `{technique, name, reason}` of variants that plan, model or engine do not allow;
    `devices`: measurements of the devices, `collectives` or `products`.
    """

    variants: list[Variant] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


def expand(spec: RunSpec) -> Expansion:
    """The variants of a benchmark whose plan is not "auto"."""
    base, body = spec.plan, spec.benchmark
    assert isinstance(base, ParallelPlan) and body is not None
    techniques = selected_techniques(body)
    expansion = Expansion(
        [Variant(BASE, BASE, base)],
        devices=[name for name in techniques if name in DEVICE_TECHNIQUES],
    )
    if "collectives" in expansion.devices and base.world_size == 1:
        expansion.devices.remove("collectives")
        _leave_out(
            expansion, "collectives", "all sizes", "one rank has no peers to communicate with"
        )
    seen = {base.to_json()}
    for technique in techniques:
        if technique in DEVICE_TECHNIQUES:
            continue
        for name, changes in _CHANGES[technique](base, spec.shape):
            compiled, fused = bool(changes.pop(_COMPILED, False)), bool(changes.pop(_FUSED, True))
            plan = _changed(base, changes)
            if isinstance(plan, str):
                _leave_out(expansion, technique, name, plan)
            elif (key := plan.to_json() + _COMPILED * compiled + _FUSED * (not fused)) not in seen:
                seen.add(key)
                reason = _forbidden(spec, plan, compiled=compiled, fused=fused)
                if reason is None:
                    expansion.variants.append(Variant(technique, name, plan, compiled, fused))
                else:
                    _leave_out(expansion, technique, name, reason)
    return expansion


def total_steps(spec: RunSpec) -> int:
    """Steps of all variants together, the total of the progress display."""
    assert spec.benchmark is not None
    return (
        len(expand(spec).variants) * repeat_count(spec.benchmark) * steps_per_repeat(spec.benchmark)
    )


def _leave_out(expansion: Expansion, technique: str, name: str, reason: str) -> None:
    expansion.left_out.append({"technique": technique, "name": name, "reason": reason})


def _changed(base: ParallelPlan, changes: dict[str, Any]) -> ParallelPlan | str:
    if "" in changes:
        return str(changes[""])
    try:
        return ParallelPlan.from_dict({**base.to_dict(), **changes})
    except ValidationError as error:
        return str(validation_problems(error)[0])


def _forbidden(spec: RunSpec, plan: ParallelPlan, *, compiled: bool, fused: bool) -> str | None:
    training = as_training(spec, plan, compiled=compiled, fused=fused)
    problems = spec_problems(training) or engine_problems(training)
    return problems[0].message if problems else None


Changes = Iterator[tuple[str, dict[str, Any]]]


def _accumulation(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    share = max(1, base.global_batch_size // base.dp)
    sizes = [size for size in range(share, 0, -1) if share % size == 0]
    # at most four sizes: a batch of 64 would otherwise need seven rows
    for size in (
        sizes if len(sizes) <= 4 else [sizes[0], sizes[1], sizes[len(sizes) // 2], sizes[-1]]
    ):
        yield f"micro-batch {size} × {share // size}", {"micro_batch_size": size}
    if len(sizes) == 1:
        message = "a rank has one sequence per step, there is nothing to accumulate"
        yield "micro-batches", {"": f"{message}. Use a larger global_batch_size."}


def _recompute(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    for kind in ("none", "selective", "full", "auto"):
        budget = base.recompute_budget_bytes if kind == "auto" else None
        yield f"recompute {kind}", {"recompute": kind, "recompute_budget_bytes": budget}


def _compile(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    for on in (False, True):
        yield "compiled blocks" if on else "eager blocks", {_COMPILED: on}


def _fused_kernels(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    for on in (True, False):
        yield "fused kernels" if on else "plain torch operations", {_FUSED: on}


def _precision(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    for name in ("fp32", "bf16", "fp16", "fp8"):
        keep = {} if name == base.precision else {"reduce_dtype": None, "loss_scale": None}
        yield name, {"precision": name, **keep}


def _zero(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    if base.dp * base.cp == 1:
        yield "ZeRO 1 to 3", {"": "one data-parallel rank has no peers to shard states with"}
        return
    for stage in range(4):
        keep = (
            {}
            if stage >= 2
            else {"dp_replicate": None, "prefetch_layers": None, "reduce_dtype": None}
        )
        yield f"ZeRO {stage}", {"zero": stage, **keep}


def _prefetch(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    if base.dp * base.cp == 1:
        yield "prefetch", {"": "one data-parallel rank gathers nothing"}
        return
    sharded = {} if base.zero == 3 else {"zero": 3}
    word = "" if base.zero == 3 else "ZeRO 3, "
    for layers in (None, 1, 2):
        yield (
            f"{word}{layers or 'no'} layer{'s' * (layers != 1)} ahead",
            {**sharded, "prefetch_layers": layers},
        )


def _offload(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    for where in ("none", "optimizer", "all", "nvme"):
        sharded = {"zero": 3} if where == "all" and base.zero < 3 and base.dp * base.cp > 1 else {}
        yield f"offload {where}" + (", ZeRO 3" if sharded else ""), {"offload": where, **sharded}


def _schedule(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    if base.pp == 1:
        yield "pipeline schedules", {"": "the plan has one pipeline stage. Use pp 2 or more."}
        return
    for name in _SCHEDULES:
        stages = (
            max(2, base.virtual_stages) if name in INTERLEAVED else 2 if name in V_SHAPED else 1
        )
        changes: dict[str, Any] = {"schedule": name, "virtual_stages": stages}
        if stages != base.virtual_stages:
            changes["stage_layers"] = None
        if name in SPLIT_BACKWARD and base.zero == 3:
            changes["zero"] = 2
        yield name + (", ZeRO 2" if "zero" in changes else ""), changes


def _sequence_parallel(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    if base.tp == 1:
        yield (
            "sequence parallel",
            {"": "it needs tensor parallelism, and tp is 1. Use tp 2 or more."},
        )
        return
    for on in (False, True):
        yield f"sequence parallel {'on' if on else 'off'}", {"sequence_parallel": on}


def _axes(base: ParallelPlan, model: ModelSpec | None) -> Changes:
    ranks = base.world_size
    if ranks == 1:
        yield "other axes", {"": "one rank has no parallel axes"}
        return
    alone = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "dp_replicate": None,
        "sequence_parallel": False,
        "stage_layers": None,
        "prefetch_layers": None,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "weight_stashing": None,
        "vertical_sync": None,
    }
    for axis in ("dp", "tp", "pp", "cp"):
        share = max(1, base.global_batch_size // (ranks if axis == "dp" else 1))
        size = next(
            size for size in range(min(base.micro_batch_size, share), 0, -1) if share % size == 0
        )
        changes: dict[str, Any] = {**alone, axis: ranks, "micro_batch_size": size}
        if axis in ("tp", "pp"):  # there are no data-parallel peers to shard with
            changes |= {"zero": 0, "reduce_dtype": None}
        yield f"{axis} {ranks}", changes


_CHANGES: dict[str, Callable[[ParallelPlan, ModelSpec | None], Changes]] = {
    "accumulation": _accumulation,
    "recompute": _recompute,
    "compile": _compile,
    "fused_kernels": _fused_kernels,
    "precision": _precision,
    "zero": _zero,
    "prefetch": _prefetch,
    "offload": _offload,
    "schedule": _schedule,
    "sequence_parallel": _sequence_parallel,
    "axes": _axes,
}
