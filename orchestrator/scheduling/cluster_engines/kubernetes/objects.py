"""The objects that a job is: a Secret with its ticket, and a JobSet with one pod per node. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.fleet.cluster_engines.kubernetes_settings import (
    KubernetesPool,
    KubernetesSettings,
)
from orchestrator.scheduling.cluster_engines.interface import Order
from workers.contracts.wire import names

GROUP = "nodes"  # the name of the only replicated job
CONTAINER = "supervisor"
MANAGED = {"app.kubernetes.io/managed-by": "orrery"}
ENGINE_LABEL = "orrery/engine"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KEEP_ENDED_S = 24 * 3600  # ended JobSets stay this long, for kubectl
_OVER_LIMIT_S = 300  # Kueue's limit comes after the supervisor's own
_OVER_GRACE_S = 30  # to report after ranks have ended
_CA_FILE = "broker-ca.crt"


def labels(engine: str, order: Order | None = None) -> dict[str, str]:
    """Labels of all objects of an engine, or of one job."""
    common = {**MANAGED, ENGINE_LABEL: engine}
    if order is None:
        return common
    return {
        **common,
        "orrery/run": str(order.run),
        "orrery/attempt": str(order.attempt),
    }


def selector(engine: str) -> str:
    """Selects the objects of an engine."""
    return ",".join(f"{name}={value}" for name, value in labels(engine).items())


def secret(order: Order, *, engine: str, namespace: str, broker_ca: str = "") -> dict[str, Any]:
    """The Secret with the job's ticket, and the broker's authority."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": order.name,
            "namespace": namespace,
            "labels": labels(engine, order),
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {"ticket": order.ticket} | ({_CA_FILE: broker_ca} if broker_ca else {}),
    }


def ownership(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """A patch with which an object is deleted together with the JobSet."""
    metadata = jobset["metadata"]
    reference = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {"metadata": {"ownerReferences": [reference]}}


def jobset(
    order: Order, settings: KubernetesSettings, *, engine: str, namespace: str, broker_ca: str = ""
) -> dict[str, Any]:
    """The JobSet, suspended until Kueue admits it; a failed pod ends it, and none is repeated."""
    pool = KubernetesPool.from_dict(dict(order.pool))
    marks = labels(engine, order)
    queue = {QUEUE_LABEL: pool.queue}
    if pool.priority_class:
        queue["kueue.x-k8s.io/priority-class"] = pool.priority_class
    if order.max_seconds:
        limit = math.ceil(order.max_seconds + settings.stop_grace_s) + _OVER_LIMIT_S
        queue["kueue.x-k8s.io/max-exec-time-seconds"] = str(limit)
    metadata: dict[str, Any] = {
        "name": order.name,
        "namespace": namespace,
        "labels": {**marks, **queue},
        "annotations": {"orrery/owner": order.owner},
    }
    if pool.topology:
        metadata["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"] = pool.topology
    template = {
        "metadata": {"labels": marks},
        "spec": {
            "parallelism": order.nodes,
            "completions": order.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": marks},
                "spec": _pod(order, settings, pool, broker_ca=bool(broker_ca)),
            },
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "suspend": True,
            "ttlSecondsAfterFinished": KEEP_ENDED_S,
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": template}],
        },
    }


def first_host(name: str) -> str:
    """The name under which other pods of the job reach the first one."""
    return f"{name}-{GROUP}-0-0.{name}"


def _pod(
    order: Order, settings: KubernetesSettings, pool: KubernetesPool, *, broker_ca: bool
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": settings.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(settings.stop_grace_s) + _OVER_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.run_as_user,
            "runAsGroup": settings.run_as_group,
            "fsGroup": settings.run_as_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(order, settings, pool, broker_ca=broker_ca)],
        "volumes": _volumes(order, settings, broker_ca=broker_ca),
    }
    if settings.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if pool.node_selector:
        spec["nodeSelector"] = dict(pool.node_selector)
    if pool.tolerations:
        spec["tolerations"] = [one.model_dump(exclude_none=True) for one in pool.tolerations]
    return spec


def _container(
    order: Order, settings: KubernetesSettings, pool: KubernetesPool, *, broker_ca: bool
) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [
        {
            "name": names.ENGINE_TICKET,
            "valueFrom": {"secretKeyRef": {"name": order.name, "key": "ticket"}},
        },
        {"name": names.JOB_ID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": names.JOB_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": names.JOB_HOST, "value": first_host(order.name)},
        {"name": "PYTHONPATH", "value": settings.source},
        {"name": "HOME", "value": settings.home},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "home", "mountPath": settings.home},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, mount in enumerate(settings.mounts):
        one = {"name": f"mount-{number}", "mountPath": mount.path, "readOnly": mount.read_only}
        mounts.append(one)
    if broker_ca:
        variables.append({"name": "ORRERY_REDIS_CA", "value": f"/etc/orrery/{_CA_FILE}"})
        mounts.append({"name": "broker-ca", "mountPath": "/etc/orrery", "readOnly": True})
    resources = _resources(order, pool)
    return {
        "name": CONTAINER,
        "image": pool.image or settings.image,
        "command": [settings.python, "-u", "-m", "workers.launcher.cluster_engines.job"],
        "workingDir": settings.source,
        "env": variables,
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _resources(order: Order, pool: KubernetesPool) -> dict[str, str]:
    """Per pod; requests equal limits, so that Kueue's quota and the node agree."""
    cpus = order.cpus or order.per_node * (pool.cpus_per_device or 1)
    listed = {"cpu": f"{math.ceil(cpus * 1000)}m" if cpus % 1 else str(int(cpus))}
    memory_gb = order.memory_gb or (pool.memory_gb_per_device or 0) * order.per_node
    if memory_gb:
        listed["memory"] = f"{math.ceil(memory_gb * 1000)}M"
    if order.gpu:
        listed[pool.gpu_resource] = str(order.per_node)
    return listed


def _volumes(
    order: Order, settings: KubernetesSettings, *, broker_ca: bool
) -> list[dict[str, Any]]:
    size = f"{math.ceil(settings.shm_gib * 1024)}Mi"
    volumes: list[dict[str, Any]] = [
        {"name": "home", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
    ]
    for number, mount in enumerate(settings.mounts):
        claim = {"claimName": mount.claim, "readOnly": mount.read_only}
        volumes.append({"name": f"mount-{number}", "persistentVolumeClaim": claim})
    if broker_ca:
        items = [{"key": _CA_FILE, "path": _CA_FILE}]
        volumes.append({"name": "broker-ca", "secret": {"secretName": order.name, "items": items}})
    return volumes
