"""Reads what Kubernetes says about a job: JobSet, Kueue's Workload and pods become a JobView. Pure.

Phase: pending until a container has started; ended when the JobSet is over or gone and no pod
lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.scheduling.cluster_engines.interface import JobView
from workers.contracts.exit_classes import ExitClass

Object = Mapping[str, Any]

DELETED = "DELETED"
DEACTIVATED = "DEACTIVATED"
_POD_PHASES = ("Succeeded", "Failed")
_DISRUPTIONS = {  # condition DisruptionTarget of a pod
    "PreemptionByScheduler": ("PREEMPTED", ExitClass.PREEMPTED),
    "EvictionByEvictionAPI": ("DRAINED", ExitClass.PREEMPTED),
    "DeletionByTaintManager": ("NODE_FAIL", ExitClass.LOST),
    "DeletionByPodGC": ("NODE_FAIL", ExitClass.LOST),
    "TerminationByKubelet": ("NODE_SHUTDOWN", ExitClass.LOST),
}
_DEACTIVATIONS = {  # suffix of the reason of condition Evicted
    "MaximumExecutionTimeExceeded": ("TIMEOUT", ExitClass.USER_ERROR),
    "RequeuingLimitExceeded": ("REQUEUE_LIMIT", ExitClass.INFRASTRUCTURE),
    "AdmissionCheck": ("REJECTED", ExitClass.USER_ERROR),
}
WAITS_FOR_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def trim_jobset(item: Object) -> dict[str, Any]:
    """What a view needs of a JobSet."""
    metadata, spec, status = (item.get(part) or {} for part in ("metadata", "spec", "status"))
    return {
        "metadata": _trimmed(metadata),
        "suspend": bool(spec.get("suspend")),
        "conditions": status.get("conditions") or [],
        "active": sum(
            int(one.get(name) or 0)
            for one in status.get("replicatedJobsStatus") or []
            for name in ("active", "ready", "succeeded", "failed")
        ),
    }


def trim_workload(item: Object) -> dict[str, Any]:
    """What a view needs of a Workload."""
    metadata, spec, status = (item.get(part) or {} for part in ("metadata", "spec", "status"))
    return {
        "metadata": {**_trimmed(metadata), "ownerReferences": metadata.get("ownerReferences")},
        "active": spec.get("active") is not False,
        "conditions": status.get("conditions") or [],
    }


def trim_pod(item: Object) -> dict[str, Any]:
    """What a view needs of a pod."""
    metadata, spec, status = (item.get(part) or {} for part in ("metadata", "spec", "status"))
    annotations, marks = (metadata.get(part) or {} for part in ("annotations", "labels"))
    index = "batch.kubernetes.io/job-completion-index"
    return {
        "metadata": _trimmed(metadata),
        "jobset": marks.get("jobset.sigs.k8s.io/jobset-name", ""),
        "index": int(annotations.get(index) or marks.get(index) or 0),
        "node": spec.get("nodeName") or "",
        "address": status.get("podIP") or "",
        "phase": status.get("phase") or "Pending",
        "reason": status.get("reason") or "",
        "message": status.get("message") or "",
        "conditions": status.get("conditions") or [],
        "containers": status.get("containerStatuses") or [],
    }


def view(
    jobset: Object,
    workload: Object | None,
    pods: Sequence[Object],
    *,
    gone: bool = False,
    has_started: bool = False,
) -> JobView:
    """The job. `gone`: the JobSet is deleted. `has_started`: a container of it ran before."""
    living = [pod for pod in pods if is_living(pod)]
    active = any(is_started(pod) for pod in living)
    name = str(jobset["metadata"]["name"])
    end = _ended(jobset, workload, pods, gone=gone) if not active else None
    phase, (state, reason, exit_class) = "ended", end or ("", "", None)
    if end is None:
        phase = "active" if active or _is_between(jobset, living, has_started) else "pending"
        state, reason = _present(jobset, workload, living, phase)
    hosts = _by_rank(pods, "node")
    return JobView(
        name=name,
        number=name,
        phase=phase,
        state=state,
        reason=reason,
        hosts=hosts,
        addresses=_by_rank(pods, "address") if hosts else (),
        exit_class=exit_class,
    )


def is_living(pod: Object) -> bool:
    """Whether processes of the pod may run."""
    return "removed" not in pod and pod["phase"] not in _POD_PHASES


def is_started(pod: Object) -> bool:
    """Whether its container runs or has run."""
    states = [one.get("state") or {} for one in pod["containers"]]
    return any("running" in state or "terminated" in state for state in states) or (
        pod["phase"] in ("Running", *_POD_PHASES)
    )


def condition(item: Object | None, kind: str, status: str = "True") -> Object | None:
    """The condition of this type if it has this status."""
    listed = (item or {}).get("conditions") or []
    return next(
        (one for one in listed if one.get("type") == kind and one["status"] == status), None
    )


def words(one: Object | None) -> str:
    """Reason and message of a condition, in the words of its writer."""
    if one is None:
        return ""
    return ": ".join(part for part in (one.get("reason"), one.get("message")) if part)


def _ended(
    jobset: Object, workload: Object | None, pods: Sequence[Object], *, gone: bool
) -> tuple[str, str, ExitClass | None] | None:
    """`(state, words, exit class)` of a job that is over and has no running pod."""
    deleted = gone or bool(jobset["metadata"].get("deletionTimestamp"))
    failed, completed = condition(jobset, "Failed"), condition(jobset, "Completed")
    evicted = condition(workload, "Evicted")
    reason = str((evicted or {}).get("reason", ""))
    if evicted and (reason.startswith("Deactivated") or not (workload or {}).get("active", True)):
        cause = reason.partition("DueTo")[2]
        state, exit_class = _DEACTIVATIONS.get(cause, (DEACTIVATED, ExitClass.CANCELLED))
        return state, words(evicted), exit_class
    if not (deleted or failed or completed):
        return None
    if end := _disrupted(pods):
        return end
    if evicted and not deleted:
        return "PREEMPTED", words(condition(workload, "Preempted") or evicted), ExitClass.PREEMPTED
    if deleted and not (failed or completed):
        return DELETED, "", ExitClass.CANCELLED
    if failed:
        return "FAILED", _pod_words(pods) or words(failed), None
    return "COMPLETED", _pod_words(pods), None


def _disrupted(pods: Sequence[Object]) -> tuple[str, str, ExitClass | None] | None:
    """What stopped the first pod that was stopped from outside or exceeded its memory."""
    for pod in sorted(pods, key=lambda one: one["index"]):
        if any(_terminated(one).get("reason") == "OOMKilled" for one in pod["containers"]):
            return (
                "OUT_OF_MEMORY",
                f"pod {pod['metadata']['name']}: OOMKilled",
                (ExitClass.OUT_OF_MEMORY),
            )
        target = condition(pod, "DisruptionTarget")
        if target and target.get("reason") in _DISRUPTIONS:
            state, exit_class = _DISRUPTIONS[str(target["reason"])]
            return state, words(target), exit_class
        if pod["reason"] in ("Evicted", "NodeLost", "NodeShutdown", "Terminated"):
            text = f"{pod['reason']}: {pod['message']}".strip(": ")
            return "NODE_PRESSURE", text, ExitClass.INFRASTRUCTURE
    return None


def _is_between(jobset: Object, living: Sequence[Object], has_started: bool) -> bool:
    """Whether pods of a job that ran are gone and its controller has not concluded yet."""
    return has_started and not living and not jobset["suspend"]


def _present(
    jobset: Object, workload: Object | None, living: Sequence[Object], phase: str
) -> tuple[str, str]:
    """State and reason, in the words of Kueue, the scheduler and the kubelet."""
    evicted = condition(workload, "Evicted")
    if phase == "active":
        stopping = bool(jobset["suspend"] or jobset["metadata"].get("deletionTimestamp"))
        detail = condition(workload, "Preempted") or evicted if jobset["suspend"] else None
        return ("Terminating", words(detail)) if stopping else ("Running", "")
    for pod in living:
        for one in pod["containers"]:
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return str(waiting["reason"]), words(waiting)
        unscheduled = condition(pod, "PodScheduled", "False")
        if unscheduled:
            return "Unschedulable", words(unscheduled)
    if not jobset["suspend"]:
        return "Starting", ""
    if workload is None:
        return "Suspended", ""
    checks = (
        condition(workload, "Admitted", "False") if condition(workload, "QuotaReserved") else None
    )
    if checks:
        return "AdmissionChecks", words(checks)
    quota = condition(workload, "QuotaReserved", "False")
    if evicted:
        return "Evicted", words(condition(workload, "Preempted") or evicted)
    return ("Pending", words(quota)) if quota else ("Pending", "")


def _by_rank(pods: Sequence[Object], field: str) -> tuple[str, ...]:
    """A field of each pod by rank; empty until all have it."""
    newest: dict[int, Object] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"].get("creationTimestamp"))):
        newest[pod["index"]] = pod
    values = tuple(str(newest[rank][field]) for rank in sorted(newest))
    return values if all(values) and sorted(newest) == list(range(len(newest))) else ()


def _pod_words(pods: Sequence[Object]) -> str:
    """The last words of a container that failed, or that started nothing."""
    for pod in sorted(pods, key=lambda one: one["index"]):
        for one in pod["containers"]:
            ended = _terminated(one)
            if ended.get("message") or ended.get("exitCode"):
                code = f"exit code {ended.get('exitCode')}"
                text = str(ended.get("message") or ended.get("reason") or code).strip()
                return f"pod {pod['metadata']['name']}: {text[-250:]}"
    return ""


def _terminated(container: Object) -> Mapping[str, Any]:
    return (container.get("state") or {}).get("terminated") or {}


def _trimmed(metadata: Object) -> dict[str, Any]:
    fields = ("name", "uid", "creationTimestamp", "deletionTimestamp", "resourceVersion")
    return {name: metadata[name] for name in fields if name in metadata}
