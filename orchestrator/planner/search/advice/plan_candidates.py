"""Changed plans, clusters and devices to predict for a plan that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.search.axes import divisors
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.units import GIB
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan

_RECOMPUTE = ("none", "selective", "full")
DOUBLINGS = 6


@dataclass(frozen=True)
class Candidate:
    """A change of one kind, as text and as values by field, and the request with it."""

    kind: str
    changes: dict[str, Any]
    message: str
    request: Request


def plan_candidates(request: Request) -> Iterator[Candidate]:
    """Changes of one kind after another, of each kind from the smallest change to the largest."""
    plan, cluster = request.plan, request.cluster

    def changed(kind: str, message: str, **changes: Any) -> Candidate:
        return Candidate(kind, changes, message, replace(request, plan=_with(plan, **changes)))

    recompute = plan.recompute if plan.recompute in _RECOMPUTE else "none"
    for level in _RECOMPUTE[_RECOMPUTE.index(recompute) + 1 :]:
        what = "everything" if level == "full" else "attention"
        yield changed(
            "recompute", f"Recompute {what} ({level} instead of {plan.recompute})", recompute=level
        )
    for zero in range(plan.zero + 1, 4):
        yield changed("zero", f"Use ZeRO {zero} instead of {plan.zero}", zero=zero)
    if plan.dp_replicate and plan.dp_replicate > 1:
        yield changed(
            "dp_replicate",
            "Shard over all data-parallel ranks instead of replicating",
            dp_replicate=None,
        )
    for size in divisors(plan.micro_batch_size)[:-1]:
        message = f"Use micro-batches of {size} instead of {plan.micro_batch_size}"
        yield changed("micro_batch_size", message, micro_batch_size=size)
    if plan.tp > 1 and not plan.sequence_parallel:
        yield changed("sequence_parallel", "Turn sequence parallelism on", sequence_parallel=True)
    if (
        plan.schedule in {"naive", "gpipe", "pipedream", "interleaved_1f1b", "dualpipev"}
        and plan.pp > 1
    ):
        yield changed(
            "schedule",
            f"Use schedule 1f1b instead of {plan.schedule}",
            schedule="1f1b",
            virtual_stages=1,
        )
    for axis in ("tp", "pp", "cp"):
        for times in (2, 4, 8):
            if plan.dp % times == 0:
                degree = getattr(plan, axis) * times
                message = (
                    f"Use {axis} {degree} and dp {plan.dp // times} instead of {degree // times} "
                    f"and {plan.dp}"
                )
                if axis != "tp" or degree <= cluster.devices_per_node:
                    yield changed(
                        axis,
                        message,
                        **{axis: degree, "dp": plan.dp // times, **_copies(plan, times)},
                    )
    for offload, what in (
        ("optimizer", "optimizer states"),
        ("all", "all states"),
        ("nvme", "all states on disk"),
    ):
        is_cpu = request.entry.kind == "cpu" and offload != "nvme"
        if plan.offload == "none" and not is_cpu:
            yield changed("offload", f"Offload {what} to the host", offload=offload)
    if plan.precision == "fp32" and request.entry.kind != "cpu":
        narrow = "bf16" if request.entry.supports("bf16") else "fp16"
        yield changed("precision", f"Use precision {narrow} instead of fp32", precision=narrow)
    yield from _more_devices(request)
    yield from _bigger_devices(request)


def _more_devices(request: Request) -> Iterator[Candidate]:
    """More data-parallel ranks on more nodes; the batch stays if it divides."""
    plan, cluster = request.plan, request.cluster
    for times in (2**power for power in range(1, DOUBLINGS + 1)):
        nodes = cluster.nodes * times
        if nodes > 2**16 or plan.dp * times > 2**16:
            return
        share = plan.micro_batch_size * plan.dp * times
        batch = plan.global_batch_size if plan.global_batch_size % share == 0 else share
        more = _with(plan, dp=plan.dp * times, global_batch_size=batch)
        wider = ClusterSpec.from_dict({**cluster.to_dict(), "nodes": nodes})
        message = f"Use {nodes} nodes instead of {cluster.nodes} (dp {more.dp})"
        if batch != plan.global_batch_size:
            message += f", and {batch} sequences per step"
        yield Candidate(
            "devices",
            {"nodes": nodes, "dp": more.dp, "global_batch_size": batch},
            message,
            replace(request, plan=more, cluster=wider),
        )


def _bigger_devices(request: Request) -> Iterator[Candidate]:
    for name, entry in sorted(
        DEVICES.items(), key=lambda item: (item[1].memory_bytes, item[1].usd_per_hour)
    ):
        if (
            entry.memory_bytes > request.entry.memory_bytes
            and entry.kind == request.entry.kind == "gpu"
        ):
            cluster = ClusterSpec.from_dict({**request.cluster.to_dict(), "device": name})
            gib = entry.memory_bytes / GIB
            message = f"Use {name} with {gib:.0f} GiB instead of {request.entry.name}"
            yield Candidate(
                "device", {"device": name}, message, replace(request, cluster=cluster, device=None)
            )


def _with(plan: ParallelPlan, **changes: Any) -> ParallelPlan:
    return ParallelPlan.from_dict({**plan.to_dict(), **changes})


def _copies(plan: ParallelPlan, times: int) -> dict[str, Any]:
    """Drops `dp_replicate` if it does not divide the smaller dp."""
    copies = plan.dp_replicate or 1
    return {} if (plan.dp // times) % copies == 0 else {"dp_replicate": None}


def is_legal(request: Request) -> bool:
    """Whether the plan is legal for the model, sequence length and devices."""
    devices = request.cluster.devices
    return not plan_problems(
        request.plan, model=request.model, seq_len=request.seq_len, devices=devices
    )
