"""Why a job waits in Kubernetes, and what to change when it is refused, as sentences. Pure text."""

from __future__ import annotations

from orchestrator.scheduling.cluster_engines.interface import JobView
from orchestrator.scheduling.cluster_engines.kubernetes.views import WAITS_FOR_IMAGE

# reason of the Workload's condition QuotaReserved
_QUOTA = {
    "Pending": "queue {queue} has too little free quota, or has not considered it yet",
    "PendingEvaluation": "queue {queue} has not considered it yet",
    "WaitingForQuota": "queue {queue} has too little free quota",
    "ExceedsMaxQuota": "it needs more than queue {queue} can ever give; request fewer devices",
    "NoMatchingFlavor": "no flavor of queue {queue} fits its node selector and tolerations",
    "TopologyPlacementFailed": "no topology domain has enough free nodes",
    "WaitingForPreemptedWorkloads": "workloads that were preempted for it are ending",
    "WaitingForPodsReady": "queue {queue} waits until the pods of earlier jobs are ready",
    "Waiting": "queue {queue} waits until the pods of earlier jobs are ready",
    "Misconfigured": "queue {queue} or its ClusterQueue is misconfigured or missing",
    "Inadmissible": "queue {queue} or its ClusterQueue is missing or inactive",
    "Suspended": "queue {queue} is stopped by an administrator",
    "OnHold": "it is on hold",
    "AdmissionGated": "another program holds it by an admission gate",
}
# reason of the condition Evicted, or of Preempted, which has more detail
_EVICTED = {
    "InClusterQueue": "a workload of higher priority took its quota",
    "InCohortReclamation": "another queue took its lent quota back",
    "InCohortFairSharing": "another queue was entitled to its share",
    "InCohortReclaimWhileBorrowing": "another queue took its lent quota back",
    "Preempted": "another workload took its quota",
    "PodsReadyTimeout": "its pods were not ready in time; see the pods' events",
    "AdmissionCheck": "an admission check refused it",
    "ClusterQueueStopped": "its ClusterQueue is stopped",
    "LocalQueueStopped": "queue {queue} is stopped",
    "NodeFailures": "a node failed",
}
_STATES = {
    "Starting": "its pods are being created",
    "Unschedulable": "no node can take a pod of it",
    "AdmissionChecks": "quota is reserved, and admission checks are not done",
    "Suspended": "Kueue has created no Workload for it; is Kueue installed, with JobSet among its "
    "integrations, and does it manage the namespace",
    "CreateContainerConfigError": "its Secret or a volume is missing",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
}
_IMAGE = (
    "its image cannot be pulled; correct `image` of the pool or the engine, or `image_pull_secret`"
)


def waiting(view: JobView, queue: str) -> str:
    """Why a pending job waits, as the end of a sentence."""
    word = view.reason.partition(":")[0]
    if view.state in WAITS_FOR_IMAGE:
        text = _IMAGE
    elif view.state == "Evicted":
        text = f"it was evicted: {_EVICTED.get(word, 'Kueue gives a reason of its own')}"
    elif view.state == "Pending":
        text = _QUOTA.get(word, f"queue {queue} has not considered it yet")
    else:
        text = _STATES.get(view.state, "Kubernetes gives a reason of its own")
    return text.format(queue=queue)


def refusal_hint(code: int, message: str) -> str:
    """What to change after the API server refused an object."""
    lower = message.lower()
    if code == 403 and "quota" in lower:
        return "Ask the cluster's administrator to raise the namespace's exhausted ResourceQuota."
    if code == 403:
        return "Apply deploy/kubernetes/engine, or ask the cluster's administrator for the right."
    if code == 404:
        return "Install JobSet in the cluster, and create the namespace."
    if "priority" in lower:
        return "Correct `priority_class` of the pool; it names a WorkloadPriorityClass of Kueue."
    return "Correct the settings of the engine or the pool."
