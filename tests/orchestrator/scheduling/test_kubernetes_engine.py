"""Kubernetes behind the engine port, against an API server that plays a cluster's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.cluster_engines.kubernetes_settings import (
    KubernetesAccess,
    KubernetesSettings,
)
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.cluster_engines import contact
from orchestrator.scheduling.cluster_engines.interface import (
    EngineUnavailable,
    JobView,
    Order,
    SubmissionDelayed,
    SubmissionRefused,
    SubmissionUnclear,
)
from orchestrator.scheduling.cluster_engines.kubernetes.engine import Kubernetes
from orchestrator.scheduling.cluster_engines.sync import sync
from orchestrator.scheduling.models import EngineJob
from tests import factories
from tests.kubernetes.api_server import Refused
from tests.kubernetes.cluster import Cluster, until

SETTINGS = {"image": "orrery:1", "claim": "runs", "poll_s": 0.5, "timeout_s": 5}
NAME = "orrery-1-1-aaaaaaaa"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


@contextmanager
def opened(cluster: Cluster, **access: Any) -> Iterator[Kubernetes]:
    access = access or {"kubeconfig": cluster.kubeconfig()}
    engine = Kubernetes(
        "k8s", KubernetesSettings.from_dict(SETTINGS), KubernetesAccess.from_dict(access)
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def port(cluster: Cluster) -> Iterator[Kubernetes]:
    with opened(cluster) as engine:
        yield engine


def order(name: str = NAME, *, queue: str = "default", nodes: int = 1) -> Order:
    values: dict[str, Any] = {"run": 1, "attempt": 1, "owner": "ada", "per_node": 1, "gpu": False}
    return Order(name=name, ticket="dA==", pool={"queue": queue}, nodes=nodes, **values)


def seen(port: Kubernetes, accept: Callable[[JobView], bool], name: str = NAME) -> JobView:
    """The job once the watch has delivered what the cluster did."""
    views: list[JobView] = []

    def current() -> bool:
        view = port.watch().get(name)
        views[:] = [view] if view else []
        return bool(view and accept(view))

    until(current)
    return views[0]


def test_a_job_is_created_once_with_its_secret(cluster: Cluster, port: Kubernetes) -> None:
    assert port.submit(order()) == NAME
    assert port.submit(order()) == NAME  # a conflict: it is the same job
    assert cluster.jobsets() == [NAME]
    [secret] = cluster.api.items("secrets")
    assert secret["metadata"]["ownerReferences"][0]["name"] == NAME
    view = seen(port, lambda one: bool(one.reason))
    assert (view.phase, view.reason) == ("pending", "Pending: insufficient unused quota for cpu")
    assert "queue default has too little free quota" in port.explain(view, {"queue": "default"})


def test_another_jobset_of_the_same_name_is_not_taken_over(
    cluster: Cluster, port: Kubernetes
) -> None:
    cluster.api.put("jobsets", {"metadata": {"name": NAME}, "spec": {}})
    with pytest.raises(SubmissionRefused, match="that Orrery did not create"):
        port.submit(order())


def test_the_watch_follows_admission_start_eviction_and_deletion(
    cluster: Cluster, port: Kubernetes
) -> None:
    port.submit(order(nodes=2))
    cluster.admit(NAME, starts=False)
    cluster.pod_waits(NAME, "ErrImagePull", "not current_view")
    view = seen(port, lambda one: one.state == "ErrImagePull")
    assert view.phase == "pending"
    assert "its image cannot be pulled" in port.explain(view, {"queue": "default"})
    for pod in cluster.pods_of(NAME):
        cluster.start_pod(pod["metadata"]["name"])
    view = seen(port, lambda one: len(one.hosts) == 2)
    assert (view.phase, view.hosts) == ("active", ("kn1", "kn2"))
    cluster.evict(NAME, "Preempted", "preempted to make room", "InClusterQueue")
    view = seen(port, lambda one: one.phase == "pending")
    assert (view.state, view.reason) == ("Evicted", "InClusterQueue: preempted to make room")
    port.cancel([NAME])
    assert seen(port, lambda one: one.phase == "ended").state == "DELETED"
    assert cluster.api.items("secrets") == []
    port.cancel([NAME])  # it is gone: no error


@pytest.mark.parametrize("lost", ["compacted", "closed"])
def test_changes_during_a_lost_watch_arrive(cluster: Cluster, port: Kubernetes, lost: str) -> None:
    port.submit(order())
    seen(port, lambda one: one.phase == "pending")
    if lost == "compacted":
        with cluster.api.changed:  # between two requests: deleted, and the history is gone
            cluster.api.remove("jobsets", NAME)
            cluster.api.forget_events()
            cluster.api.end_watches()
    else:
        cluster.api.end_watches()
        cluster.api.remove("jobsets", NAME)
    assert seen(port, lambda one: one.phase == "ended").exit_class == "cancelled"


def test_a_long_list_is_read_over_its_pages(cluster: Cluster, port: Kubernetes) -> None:
    marks = {"app.kubernetes.io/managed-by": "orrery", "orrery/engine": "k8s"}
    for number in range(1001):
        metadata = {"name": f"j{number}", "labels": marks}
        cluster.api.put("jobsets", {"metadata": metadata, "spec": {"suspend": True}})
    cluster.api.put("jobsets", {"metadata": {"name": "other"}, "spec": {}})
    assert set(port.watch()) == {f"j{number}" for number in range(1001)}


def test_a_deleted_job_has_ended_also_if_it_was_never_listed(port: Kubernetes) -> None:
    view = port.lookup(number=NAME, name=NAME)
    assert view is not None and (view.state, view.phase) == ("DELETED", "ended")


def test_a_queue_that_does_not_exist_is_refused(cluster: Cluster, port: Kubernetes) -> None:
    with pytest.raises(SubmissionRefused, match="no LocalQueue nowhere") as caught:
        port.submit(order(queue="nowhere"))
    assert "Correct `queue`" in caught.value.hint
    assert cluster.api.created == []


@pytest.mark.parametrize(
    ("method", "plural", "code", "raised", "words"),
    [
        ("POST", "jobsets", 403, SubmissionRefused, "deploy/kubernetes/engine"),
        ("POST", "jobsets", 404, SubmissionRefused, "Install JobSet"),
        ("POST", "jobsets", 500, SubmissionUnclear, "500"),
        ("POST", "secrets", 503, SubmissionDelayed, "503"),
        ("POST", "secrets", 401, SubmissionDelayed, "expired"),
        ("GET", "localqueues", 429, SubmissionDelayed, "429"),
    ],
)
def test_a_submission_that_fails_is_repeated_if_that_helps(
    cluster: Cluster,
    port: Kubernetes,
    method: str,
    plural: str,
    code: int,
    raised: type[Exception],
    words: str,
) -> None:
    cluster.api.refuse[method, plural] = Refused(code, "Reason", "some words")
    with pytest.raises(raised) as caught:
        port.submit(order())
    assert words in f"{caught.value} {getattr(caught.value, 'hint', '')}"
    if raised is SubmissionRefused:
        assert cluster.api.items("secrets") == []  # nothing is left behind


def test_an_exceeded_resource_quota_is_tried_again(cluster: Cluster, port: Kubernetes) -> None:
    refusal = Refused(403, "Forbidden", "exceeded quota: team, requested: count/jobsets=1")
    cluster.api.refuse["POST", "jobsets"] = refusal
    with pytest.raises(SubmissionDelayed):
        port.submit(order())


@pytest.mark.parametrize(
    ("code", "words"), [(401, "has expired"), (403, "does not allow Orrery to list jobsets")]
)
def test_a_login_that_is_refused_has_a_hint(cluster: Cluster, code: int, words: str) -> None:
    cluster.api.refuse["GET", "jobsets"] = Refused(code, "Reason", "some words")
    with opened(cluster) as port, pytest.raises(EngineUnavailable, match=words):
        port.watch()


def test_an_expired_token_ends_the_watch(cluster: Cluster, port: Kubernetes) -> None:
    port.watch()
    cluster.api.token = "another"
    cluster.api.end_watches()

    def fails() -> bool:
        try:
            port.watch()
        except EngineUnavailable as error:
            return "expired" in str(error)
        return False

    until(fails)


def test_another_server_is_unavailable(cluster: Cluster) -> None:
    wrong = cluster.kubeconfig().replace(str(cluster.api.port), "9")
    with opened(cluster, kubeconfig=wrong) as port, pytest.raises(EngineUnavailable, match="does"):
        port.watch()


def test_without_kueue_or_with_another_version_it_is_unavailable(cluster: Cluster) -> None:
    cluster.api.kueue_versions = ["v1"]
    with opened(cluster) as port, pytest.raises(EngineUnavailable, match="serves v1; Orrery knows"):
        port.capacity()
    cluster.api.kueue_versions = ["v1beta1"]  # an older Kueue
    with opened(cluster) as port:
        assert port.capacity().partitions[0].name == "default"


def test_capacity_is_that_of_queues_with_quota_and_nodes(
    cluster: Cluster, port: Kubernetes
) -> None:
    capacity = port.capacity()
    [queue] = capacity.partitions
    assert capacity.version == "1.34.1" and (queue.waiting, queue.running) == (1, 2)
    assert (queue.cpus_per_node, queue.nodes_idle, queue.up) == (4, 1, True)
    assert [(q.resource, q.used, q.total) for q in queue.quota] == [("cpu", 2.5, 8.0)]
    for plural in ("nodes", "clusterqueues"):  # rights over the whole cluster are optional
        cluster.api.refuse["GET", plural] = Refused(403, "Forbidden", "no")
    [queue] = port.capacity().partitions
    assert (queue.nodes, queue.quota) == (0, ())


def test_requests_of_a_pass_do_not_grow_with_the_number_of_jobs(
    cluster: Cluster, port: Kubernetes
) -> None:
    port.watch()
    before = len(cluster.api.requests)
    for _ in range(20):
        port.watch()
    assert len(cluster.api.requests) == before


def test_an_engine_without_any_login_is_unavailable() -> None:
    settings = KubernetesSettings.from_dict(SETTINGS)
    with pytest.raises(EngineUnavailable, match="--kubeconfig"):
        Kubernetes("k8s", settings, KubernetesAccess())
    with pytest.raises(EngineUnavailable, match="set server="):
        Kubernetes("k8s", settings, KubernetesAccess(token="t"))


# --- passes of the control plane over the engine


@pytest.fixture
def row(cluster: Cluster, db: None, broker: None) -> Iterator[EngineRow]:
    credentials = {"kubeconfig": cluster.kubeconfig()}
    row = engines.engine_add(
        by=None, name="k8s", kind="kubernetes", settings=SETTINGS, credentials=credentials
    )
    engines.engine_pool_set(engine=row, by=None, pool="k8s", settings={"queue": "default"})
    yield row
    contact.disconnect()


@pytest.fixture
def run(row: EngineRow) -> Run:
    owner = factories.user("ada", role="submitter")
    spec = factories.spec(resources={"pool": "k8s"})
    return runs.run_submit(owner=owner, name="k8s", spec=spec)


def passes(row: EngineRow, run: Run, reached: Callable[[], bool]) -> Attempt:
    def current() -> bool:
        fresh = EngineRow.objects.get(pk=row.pk)
        assert sync(fresh, contact.connect(fresh)), EngineRow.objects.get(pk=row.pk).status
        run.refresh_from_db()
        return reached()

    until(current)
    return Attempt.objects.filter(run=run).latest("number")


def job_name(run: Run) -> str:
    job = EngineJob.objects.filter(attempt__run=run).latest("pk")
    return job.name


def test_credentials_are_encrypted_and_never_shown(row: EngineRow, cluster: Cluster) -> None:
    assert cluster.api.token not in row.credentials
    assert cluster.api.token not in str(engines.serialize_engine(row))
    engines.engine_update(engine=row, by=None, credentials={"redis_url": "redis://other:1"})
    assert contact.connect(EngineRow.objects.get(pk=row.pk)) is not None
    engines.engine_update(engine=row, by=None, credentials={"kubeconfig": None})
    with pytest.raises(EngineUnavailable):
        contact.connect(EngineRow.objects.get(pk=row.pk))


def test_an_evicted_job_is_replaced_with_a_reason(
    cluster: Cluster, row: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    passes(row, run, lambda: "too little free quota" in run.wait_reason)
    first = job_name(run)
    cluster.admit(first)
    passes(row, run, lambda: EngineJob.objects.get(name=first).state == "active")
    [share] = Attempt.objects.get(run=run).placement
    assert (share["host"], share["address"]) == ("kn1", "127.0.0.1")
    cluster.evict(first, "Preempted", "make room", "InClusterQueue")
    attempt = passes(row, run, lambda: len(cluster.jobsets()) == 1 and job_name(run) != first)
    assert attempt.number == 2 and cluster.jobsets() == [job_name(run)]
    ended = Attempt.objects.get(run=run, number=1)
    assert ended.exit_class == "preempted"
    assert "Kubernetes: InClusterQueue: make room" in str(ended.exit["reason"])


def test_a_job_deleted_by_a_person_cancels_its_run(
    cluster: Cluster, row: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    passes(row, run, lambda: bool(run.wait_reason))
    cluster.api.remove("jobsets", job_name(run))
    passes(row, run, lambda: run.state == "cancelled")
    assert "deleted in Kubernetes, not by Orrery" in str(run.exit["reason"])
    assert Attempt.objects.filter(run=run).count() == 1 and cluster.jobsets() == []


def test_a_run_cancelled_while_it_waits_deletes_its_job(
    cluster: Cluster, row: EngineRow, run: Run
) -> None:
    passes(row, run, lambda: bool(run.wait_reason))
    runs.run_cancel(run=run, by=run.owner)
    passes(row, run, lambda: cluster.jobsets() == [])
    assert run.state == "cancelled"


def test_a_lost_answer_starts_nothing_twice(
    cluster: Cluster, row: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.UNCLEAR", timedelta())

    def lose(event: str, item: dict[str, Any]) -> None:
        Cluster._on_created(cluster, event, item)
        if event == "jobsets":
            raise Refused(504, "Timeout", "the answer is lost")

    monkeypatch.setattr(cluster.api, "on_created", lose)
    passes(row, run, lambda: EngineJob.objects.get(attempt__run=run).state == "pending")
    assert len(cluster.jobsets()) == 1


def test_a_missing_queue_fails_the_run_with_what_to_change(
    cluster: Cluster, row: EngineRow, run: Run
) -> None:
    engines.engine_pool_set(engine=row, by=None, pool="k8s", settings={"queue": "gone"})
    passes(row, run, lambda: run.state == "failed")
    assert "Correct `queue` of the pool" in str(run.exit["reason"])
    contact.refresh(row, contact.connect(row), force=True)
    assert "pool k8s names queue gone" in row.status["message"]


def test_the_authority_of_the_brokers_certificate_reaches_pods(
    cluster: Cluster, row: EngineRow, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_text("-----BEGIN CERTIFICATE-----")
    monkeypatch.setenv("ORRERY_REDIS_CA", str(authority))
    credentials = {"kubeconfig": cluster.kubeconfig(), "redis_url": "rediss://:p@broker:6379/0"}
    engines.engine_update(engine=row, by=None, credentials=credentials)
    passes(row, run, lambda: cluster.jobsets() != [])
    [secret] = cluster.api.items("secrets")
    assert "BEGIN CERTIFICATE" in secret["stringData"]["broker-ca.crt"]
    assert "ORRERY_REDIS_CA" in str(cluster.api.get("jobsets", job_name(run)))
