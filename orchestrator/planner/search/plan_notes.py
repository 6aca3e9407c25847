"""Notes on plans: stale gradients, a lower precision peak, unknown host memory and disk.

Reads plans and their predictions; does not rank plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.planner.model.finetuning.rollout_columns import rollouts_of
from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.terms import Table
from workers.contracts.catalog.units import GIB


def notes_by_plan(requests: Sequence[Request], table: Table) -> list[list[str]]:
    """The notes of each plan's answer."""
    return [
        [
            note
            for note in (
                _precision(request),
                _host(request, float(host_bytes)),
                _stale(request),
                _reduced_often(request),
                _disk(request),
                _rollouts(request, float(share)),
            )
            if note
        ]
        for request, host_bytes, share in zip(
            requests,
            table.column("host_bytes"),
            np.broadcast_to(table.column("generation_share"), table.n),
            strict=True,
        )
    ]


def notes_on_ranking(ranked: Sequence[Request], table: Table | None) -> list[str]:
    """Notes on ranked plans, which are named by rank; `table` may hold more rows."""
    if table is None or not ranked:
        return []
    notes = []
    stale = [str(rank) for rank, item in enumerate(ranked, 1) if item.plan.schedule == "pipedream"]
    if stale:
        which = ", ".join(stale[:6]) + (" and others" if len(stale) > 6 else "")
        notes.append(
            f"Number {which}: pipedream updates weights with stale gradients, so training differs "
            "from all other schedules. Fix the schedule to exclude it."
        )
    holds = table.column("host_bytes")
    for rank, (request, host_bytes) in enumerate(zip(ranked, holds, strict=False), 1):
        if (
            request.cluster.host_gib_per_device is None
            and host_bytes * _devices_per_node(request) >= GIB
        ):
            notes.append(
                f"Number {rank} stores {_gib_per_node(request, float(host_bytes))} GiB of states "
                "in the memory of each host, whose size is unknown: only device memory was "
                f"checked. {_HOST_HINT}"
            )
            break
    return [*dict.fromkeys(filter(None, map(_precision, ranked))), *notes]


_HOST_HINT = "Set the cluster's host_gib_per_device to check it."


def _precision(request: Request) -> str:
    """Empty if the device multiplies in the plan's precision."""
    precision, entry = request.plan.precision, request.entry
    used = entry.compute_precision(precision)
    if used == precision:
        return ""
    return (
        f"{entry.name} does not multiply in {precision}: time and MFU refer to its {used} peak, "
        f"{entry.peak(used):g} TFLOP/s, the maximum for this plan on it."
    )


def _host(request: Request, host_bytes: float) -> str:
    if host_bytes * _devices_per_node(request) < GIB:  # every host has that
        return ""
    if request.entry.kind == "cpu":
        return "On a CPU the device is the host: offloaded states stay in the same memory."
    needed, limit_gib = _gib_per_node(request, host_bytes), request.cluster.host_gib_per_device
    if limit_gib is None:
        return (
            f"It stores {needed} GiB of states in the memory of each host, whose size is unknown: "
            f"only device memory was checked. {_HOST_HINT}"
        )
    if host_bytes > limit_gib * GIB:
        limit = limit_gib * _devices_per_node(request)
        return f"Each host needs {needed} GiB for states and has {limit:,.0f} GiB."
    return ""


def _disk(request: Request) -> str:
    if request.plan.offload != "nvme":
        return ""
    return "All its states are on each node's disks, whose size is unknown."


def _stale(request: Request) -> str:
    if request.plan.schedule != "pipedream" or request.plan.pp == 1:
        return ""
    return (
        "pipedream updates weights with stale gradients, so training differs from all other "
        "schedules."
    )


def _reduced_often(request: Request) -> str:
    plan = request.plan
    if plan.zero != 2 or plan.pp == 1 or plan.schedule == "pipedream" or plan.accumulation < 2:
        return ""
    return (
        f"ZeRO 2 with a pipeline reduces gradients {plan.accumulation} times per step, after each "
        "micro-batch, and keeps all weights gathered. ZeRO 1 reduces them once and stores full "
        "gradients."
    )


def _gib_per_node(request: Request, host_bytes: float) -> str:
    return f"{host_bytes * _devices_per_node(request) / GIB:,.0f}"


def _devices_per_node(request: Request) -> int:
    return min(request.plan.world_size, request.cluster.devices_per_node)


def _rollouts(request: Request, share: float) -> str:
    """The share of generation in a run that samples its texts, and how answers are counted."""
    rollouts = rollouts_of(request.train)
    if rollouts is None:
        return ""
    note = (
        f"Generation takes {share:.0%} of the step if all answers have {rollouts.new_tokens} "
        "tokens; answers that end earlier take less."
    )
    if rollouts.reward_models:
        note += " Reward models are counted with the policy's size, and their time is not counted."
    return note
