"""What Kueue's queues of the namespace offer: one Partition per LocalQueue. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.scheduling.cluster_engines.interface import Partition, Quota

Object = Mapping[str, Any]
_SUFFIXES = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}


def quantity(text: object) -> float:
    """The number of a Kubernetes quantity such as `500m` or `16Gi`; 0 for another text."""
    word = str(text)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if word.endswith(suffix):
            word, factor = word.removesuffix(suffix), _SUFFIXES[suffix]
            break
    else:
        factor = 1.0
    try:
        return float(word) * factor
    except ValueError:
        return 0.0


def partitions(
    local_queues: Sequence[Object],
    cluster_queues: Mapping[str, Object],
    nodes: Sequence[Object],
    gpu_resource: str,
) -> tuple[Partition, ...]:
    """The queues by name; `cluster_queues` and `nodes` are empty if they may not be read."""
    allocatable = [node.get("status", {}).get("allocatable") or {} for node in nodes]
    ready = [node for node in nodes if _is_ready(node)]
    shape = {
        "nodes": len(nodes),
        "nodes_idle": len(ready),
        "cpus_per_node": int(max((quantity(one.get("cpu", 0)) for one in allocatable), default=0)),
        "gpus_per_node": int(
            max((quantity(one.get(gpu_resource, 0)) for one in allocatable), default=0)
        ),
        "memory_mb": int(
            max((quantity(one.get("memory", 0)) for one in allocatable), default=0) / 1e6
        ),
    }
    rows = []
    for queue in sorted(local_queues, key=lambda one: str(one["metadata"]["name"])):
        spec, status = queue.get("spec") or {}, queue.get("status") or {}
        cluster = cluster_queues.get(str(spec.get("clusterQueue", "")))
        rows.append(
            Partition(
                name=queue["metadata"]["name"],
                up=_is_active(queue),
                waiting=int(status.get("pendingWorkloads") or 0),
                running=int(status.get("admittedWorkloads") or 0),
                quota=_quota(cluster, status),
                **shape,  # type: ignore[arg-type]
            )
        )
    return tuple(rows)


def _is_active(queue: Object) -> bool:
    if (queue.get("spec") or {}).get("stopPolicy") in ("Hold", "HoldAndDrain"):
        return False
    conditions = (queue.get("status") or {}).get("conditions") or []
    return all(one.get("status") != "False" for one in conditions if one.get("type") == "Active")


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    is_ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return is_ready and not (node.get("spec") or {}).get("unschedulable")


def _quota(cluster: Object | None, status: Object) -> tuple[Quota, ...]:
    """Used quota of all queues of the ClusterQueue of its total, else of the LocalQueue alone."""
    total: dict[str, float] = {}
    used: dict[str, float] = {}
    usage = ((cluster or {}).get("status") or {}).get("flavorsUsage") if cluster else None
    for flavor in usage or status.get("flavorsUsage") or []:
        for one in flavor.get("resources") or []:
            used[one["name"]] = used.get(one["name"], 0) + quantity(one.get("total", 0))
    for group in ((cluster or {}).get("spec") or {}).get("resourceGroups") or []:
        for flavor in group.get("flavors") or []:
            for one in flavor.get("resources") or []:
                name = one["name"]
                total[name] = total.get(name, 0) + quantity(one.get("nominalQuota", 0))
    names = sorted({*used, *total})
    return tuple(Quota(name, used.get(name, 0.0), total.get(name)) for name in names)
