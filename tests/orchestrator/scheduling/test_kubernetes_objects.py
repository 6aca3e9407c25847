"""Objects for Kubernetes against the published schemas, and what views read out of its answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.fleet.cluster_engines.kubeconfig import NotUsable, read
from orchestrator.fleet.cluster_engines.kubernetes_settings import (
    KubernetesAccess,
    KubernetesPool,
    KubernetesSettings,
)
from orchestrator.scheduling.cluster_engines.interface import Order
from orchestrator.scheduling.cluster_engines.kubernetes import objects, queues, reasons, views
from tests.kubernetes import schemas

SETTINGS = KubernetesSettings(
    image="registry.example.com/orrery-node:0.2",
    claim="orrery-runs",
    image_pull_secret="pull",
    mounts=[{"claim": "data", "path": "/data"}],
    stop_grace_s=45.5,
)
POOL = {
    "queue": "team-a",
    "priority_class": "high",
    "device": "h100-80g",
    "node_selector": {"example.com/gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
    "topology": "cloud.example.com/rack",
    "memory_gb_per_device": 64,
}


def _order(**changes: Any) -> Order:
    values = {
        "name": "orrery-7-2-abcdef12",
        "run": 7,
        "attempt": 2,
        "owner": "ada",
        "nodes": 2,
        "per_node": 8,
        "gpu": True,
        "ticket": "dGlja2V0",
        "pool": POOL,
        "max_seconds": 60.0,
    }
    return Order(**{**values, **changes})


def _jobset(**changes: Any) -> dict[str, Any]:
    made = {"engine": "k8s", "namespace": "orrery", "broker_ca": "pem"}
    return objects.jobset(_order(**changes), SETTINGS, **made)


@pytest.mark.parametrize(
    "changes",
    [{}, {"gpu": False, "pool": {"queue": "q"}, "max_seconds": None}, {"cpus": 2.5, "nodes": 1}],
)
def test_all_objects_are_valid_against_their_published_schemas(changes: dict[str, Any]) -> None:
    secret = objects.secret(_order(**changes), engine="k8s", namespace="orrery", broker_ca="pem")
    for item in (_jobset(**changes), secret):
        assert schemas.problems(item) == []


def test_the_schemas_refuse_what_an_api_server_refuses() -> None:
    wrong = _jobset()
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["image"] = "x"
    wrong["spec"]["suspended"] = True
    wrong["metadata"]["label"] = {}
    assert len(schemas.problems(wrong)) == 3
    secret = objects.secret(_order(), engine="k8s", namespace="orrery")
    assert schemas.problems({**secret, "content": {}}) != []


def test_the_jobset_waits_for_its_queue_and_repeats_nothing() -> None:
    made = _jobset()
    labels = made["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a" and made["spec"]["suspend"] is True
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    assert labels["kueue.x-k8s.io/max-exec-time-seconds"] == "406"
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0)
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 76
    [container] = pod["containers"]
    limits = {"cpu": "8", "memory": "512000M", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": limits, "limits": limits}
    # the ticket is in the Secret only
    assert "dGlja2V0" not in str(made)
    assert pod["automountServiceAccountToken"] is False


def test_labels_of_an_engine_select_its_objects_only() -> None:
    marks = _jobset()["metadata"]["labels"]
    chosen = dict(pair.split("=") for pair in objects.selector("k8s").split(","))
    assert chosen.items() <= marks.items()
    assert not (
        dict(p.split("=") for p in objects.selector("other").split(",")).items() <= marks.items()
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"server": "http://10.0.0.1"}, "server"),
        ({"namespace": "Orrery"}, "namespace"),
        ({"image": "an image"}, "image"),
        ({"claim": "../x"}, "claim"),
        ({"home": "runs"}, "home"),
        ({"run_as_user": 0}, "run_as_user"),
        ({"python": "sh -c"}, "python"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_wrong_settings_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        KubernetesSettings.from_dict({"image": "i", "claim": "c", **change})
    assert field in {str(problem["loc"][0]) for problem in caught.value.errors()}


def test_a_queues_name_must_be_one() -> None:
    with pytest.raises(ValidationError):
        KubernetesPool.from_dict({"queue": "a/b"})


CONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: k, user: u, namespace: n}}]
clusters: [{name: k, cluster: {server: 'https://k:6443', %s}}]
users: [{name: u, user: {%s}}]
"""


def test_a_kubeconfig_is_read() -> None:
    login = read(CONFIG % ("certificate-authority-data: YWJj", "token: t"))
    assert (login.server, login.ca, login.token) == ("https://k:6443", "abc", "t")


@pytest.mark.parametrize(
    ("cluster", "user", "message"),
    [
        ("", "exec: {command: aws}", "runs a program"),
        ("", "auth-provider: {name: gcp}", "runs a program"),
        ("certificate-authority: /etc/passwd", "token: t", "names a file"),
        ("", "tokenFile: /etc/shadow", "names a file"),
        ("insecure-skip-tls-verify: true", "token: t", "skips the check"),
        ("", "username: a, password: b", "password"),
        ("certificate-authority-data: '%'", "token: t", "not base64"),
    ],
)
def test_a_kubeconfig_that_runs_or_reads_something_is_refused(
    cluster: str, user: str, message: str
) -> None:
    text = CONFIG.replace("%s", "{}", 2)
    text = CONFIG % (cluster, user)
    with pytest.raises(NotUsable, match=message):
        read(text)
    with pytest.raises(ValidationError, match=message):
        KubernetesAccess(kubeconfig=text)


@pytest.mark.parametrize("text", ["", "a: [", "kind: Pod", "kind: Config", "[]"])
def test_a_text_that_is_no_kubeconfig_is_refused(text: str) -> None:
    with pytest.raises(NotUsable):
        read(text)


# --- views


def _set(*, suspend: bool = False, conditions: tuple[Any, ...] = (), **metadata: Any) -> Any:
    item = {
        "metadata": {"name": "j", "uid": "u", **metadata},
        "spec": {"suspend": suspend},
        "status": {"conditions": [_condition(*one) for one in conditions]},
    }
    return views.trim_jobset(item)


def _condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _work(*conditions: tuple[str, ...], active: bool = True) -> Any:
    status = {"conditions": [_condition(*one) for one in conditions]}
    return views.trim_workload({"metadata": {}, "spec": {"active": active}, "status": status})


def _pod(rank: int = 0, state: Any = None, **status: Any) -> Any:
    if state is not None:
        status["containerStatuses"] = [{"name": "supervisor", "state": state}]
    index = {"batch.kubernetes.io/job-completion-index": str(rank)}
    metadata = {"name": f"p{rank}", "uid": str(rank), "annotations": index}
    return views.trim_pod(
        {"metadata": metadata, "spec": {"nodeName": f"n{rank}"}, "status": status}
    )


RUNS = {"running": {}}


@pytest.mark.parametrize(
    ("seen", "phase", "state", "exit_class"),
    [
        (((_set(suspend=True)), None, []), "pending", "Suspended", None),
        (
            (_set(suspend=True), _work(("QuotaReserved", "False", "Pending", "m")), []),
            "pending",
            "Pending",
            None,
        ),
        ((_set(), _work(), []), "pending", "Starting", None),
        ((_set(), _work(), [_pod(phase="Pending")]), "pending", "Starting", None),
        ((_set(), _work(), [_pod(0, RUNS, phase="Running"), _pod(1)]), "active", "Running", None),
        (
            (_set(suspend=True), _work(("Evicted", "True", "Preempted")), [_pod(0, RUNS)]),
            "active",
            "Terminating",
            None,
        ),
        (
            (_set(suspend=True), _work(("Evicted", "True", "Preempted")), []),
            "pending",
            "Evicted",
            None,
        ),
        (
            (_set(conditions=(("Completed", "True"),)), _work(), [_pod(phase="Succeeded")]),
            "ended",
            "COMPLETED",
            None,
        ),
        ((_set(conditions=(("Failed", "True"),)), _work(), []), "ended", "FAILED", None),
        ((_set(deletionTimestamp="t"), _work(), [_pod(0, RUNS)]), "active", "Terminating", None),
        ((_set(deletionTimestamp="t"), _work(), []), "ended", "DELETED", "cancelled"),
        (
            (_set(suspend=True), _work(("Evicted", "True", "Deactivated"), active=False), []),
            "ended",
            "DEACTIVATED",
            "cancelled",
        ),
        (
            (
                _set(suspend=True),
                _work(
                    ("Evicted", "True", "DeactivatedDueToMaximumExecutionTimeExceeded"),
                    active=False,
                ),
                [],
            ),
            "ended",
            "TIMEOUT",
            "user_error",
        ),
        (
            (
                _set(suspend=True),
                _work(("Evicted", "True", "DeactivatedDueToRequeuingLimitExceeded"), active=False),
                [],
            ),
            "ended",
            "REQUEUE_LIMIT",
            "infrastructure",
        ),
        (
            (
                _set(conditions=(("Failed", "True"),)),
                _work(),
                [_pod(0, {"terminated": {"reason": "OOMKilled"}}, phase="Failed")],
            ),
            "ended",
            "OUT_OF_MEMORY",
            "out_of_memory",
        ),
        (
            (
                _set(conditions=(("Failed", "True"),)),
                _work(),
                [
                    _pod(
                        phase="Failed",
                        conditions=[
                            _condition("DisruptionTarget", "True", "DeletionByTaintManager")
                        ],
                    )
                ],
            ),
            "ended",
            "NODE_FAIL",
            "lost",
        ),
        (
            (
                _set(conditions=(("Completed", "True"),)),
                _work(),
                [
                    _pod(
                        phase="Succeeded",
                        conditions=[
                            _condition("DisruptionTarget", "True", "EvictionByEvictionAPI")
                        ],
                    )
                ],
            ),
            "ended",
            "DRAINED",
            "preempted",
        ),
        (
            (
                _set(conditions=(("Failed", "True"),)),
                _work(),
                [_pod(phase="Failed", reason="Evicted", message="low on memory")],
            ),
            "ended",
            "NODE_PRESSURE",
            "infrastructure",
        ),
        (
            (
                _set(conditions=(("Completed", "True"),)),
                _work(("Evicted", "True", "Preempted")),
                [_pod(phase="Succeeded")],
            ),
            "ended",
            "PREEMPTED",
            "preempted",
        ),
    ],
)
def test_phases(seen: Any, phase: str, state: str, exit_class: str | None) -> None:
    view = views.view(*seen)
    assert (view.phase, view.state, view.exit_class) == (phase, state, exit_class)


def test_pods_that_vanish_before_their_jobset_ends_are_no_requeue() -> None:
    assert views.view(_set(), _work(), [], has_started=True).phase == "active"
    assert views.view(_set(suspend=True), _work(), [], has_started=True).phase == "pending"


def test_a_deleted_jobset_ends_when_its_pods_have() -> None:
    assert views.view(_set(), None, [_pod(0, RUNS)], gone=True).phase == "active"
    assert views.view(_set(), None, [], gone=True).exit_class == "cancelled"


def test_hosts_are_known_when_all_pods_have_a_node() -> None:
    pods = [_pod(1, RUNS, podIP="10.0.0.2"), _pod(0, RUNS, podIP="10.0.0.1")]
    view = views.view(_set(), _work(), pods)
    assert view.hosts == ("n0", "n1") and view.addresses == ("10.0.0.1", "10.0.0.2")
    assert views.view(_set(), _work(), pods[:1]).hosts == ()


@pytest.mark.parametrize(
    ("workload", "pods", "sentence"),
    [
        (
            _work(("QuotaReserved", "False", "Pending", "insufficient quota for cpu")),
            [],
            "queue q has too little free quota",
        ),
        (
            _work(("QuotaReserved", "False", "ExceedsMaxQuota", "m")),
            [],
            "more than queue q can ever give",
        ),
        (
            _work(("QuotaReserved", "False", "Inadmissible", "LocalQueue q doesn't exist")),
            [],
            "missing or inactive",
        ),
        (
            _work(
                ("QuotaReserved", "True"), ("Admitted", "False", "UnsatisfiedAdmissionChecks", "m")
            ),
            [],
            "admission checks are not done",
        ),
        (
            _work(
                ("Evicted", "True", "Preempted", "m"),
                ("Preempted", "True", "InCohortReclamation", "m"),
            ),
            [],
            "took its lent quota back",
        ),
        (_work(("Evicted", "True", "PodsReadyTimeout", "m")), [], "not ready in time"),
        (None, [], "Kueue has created no Workload"),
        (
            _work(),
            [_pod(0, {"waiting": {"reason": "ErrImagePull", "message": "not view"}})],
            "its image cannot be pulled",
        ),
        (
            _work(),
            [_pod(conditions=[_condition("PodScheduled", "False", "Unschedulable", "0/3 nodes")])],
            "no node can take a pod",
        ),
    ],
)
def test_a_waiting_job_is_explained_in_a_sentence(
    workload: Any, pods: list[Any], sentence: str
) -> None:
    view = views.view(_set(suspend=not pods), workload, pods)
    assert sentence in reasons.waiting(view, "q")
    words = views.words(
        views.condition(workload, "Preempted") or views.condition(workload, "Evicted")
    )
    if words:
        assert view.reason == words  # Kueue's own words


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), ("4", 4), ("16Gi", 2**34), ("2k", 2000), ("x", 0), ("1e3", 1000)],
)
def test_quantities(text: str, number: float) -> None:
    assert queues.quantity(text) == number
