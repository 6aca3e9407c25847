"""Kubernetes as an engine: one JobSet per attempt, admitted by Kueue.

Mirrors of JobSets, Workloads and pods answer `watch` without a request. A JobSet's name is its
identity: it holds run, attempt and fence, so a second creation is a conflict and starts nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.fleet.cluster_engines.kubeconfig import Login, read
from orchestrator.fleet.cluster_engines.kubernetes_settings import (
    KubernetesAccess,
    KubernetesSettings,
)
from orchestrator.scheduling.cluster_engines.interface import (
    Capacity,
    EngineUnavailable,
    JobView,
    Order,
    SubmissionDelayed,
    SubmissionRefused,
    SubmissionUnclear,
)
from orchestrator.scheduling.cluster_engines.kubernetes import objects, queues, reasons, views
from orchestrator.scheduling.cluster_engines.kubernetes.api import (
    JOBSETS,
    PODS,
    SECRETS,
    Api,
    ApiError,
    Connection,
    NoAnswer,
    in_cluster,
    refused,
)
from orchestrator.scheduling.cluster_engines.kubernetes.informer import Informer

_KUEUE = "/apis/kueue.x-k8s.io"
_KNOWN_KUEUE = ("v1beta2", "v1beta1")
_DELETED_FOR_S = 3600.0  # a deleted job is reported for this long
_GPU = "nvidia.com/gpu"


class Kubernetes:
    """One namespace of one cluster. `close` ends its threads."""

    problem = ""

    def __init__(
        self,
        name: str,
        settings: KubernetesSettings,
        access: KubernetesAccess,
        *,
        broker_ca: str = "",
    ) -> None:
        self.settings, self._name, self._broker_ca = settings, name, broker_ca
        login = _login(settings, access)
        self._api = Api(Connection(login, settings.namespace, settings.timeout_s))
        self._informers: dict[str, Informer] = {}
        self._kueue = ""
        self._started: set[str] = set()  # uids of JobSets of which a container ran

    def close(self) -> None:
        """End connections and threads."""
        for informer in self._informers.values():
            informer.close()
        self._api.end_watches()
        for informer in self._informers.values():
            informer.join()
        self._api.close()

    def submit(self, order: Order) -> str:
        """The JobSet's name. Raises the interface's Submission errors."""
        self._require_queue(order)
        made: dict[str, Any] = {"engine": self._name, "namespace": self.settings.namespace}
        made["broker_ca"] = self._broker_ca
        body = objects.jobset(order, self.settings, **made)
        self._create_secret(objects.secret(order, **made))
        try:
            created = self._api.create(self._api.path(JOBSETS), body)
        except NoAnswer as error:
            raise SubmissionUnclear(str(error)) from None
        except ApiError as error:
            if error.code != 409:
                self._discard_secret(order.name)
                raise _submission_error(error) from None
            created = self._get(JOBSETS, order.name) or {}
            attempt = ((created.get("metadata") or {}).get("labels") or {}).get("orrery/attempt")
            if attempt != str(order.attempt):
                raise SubmissionRefused(
                    f"a JobSet named {order.name} exists that Orrery did not create",
                    "Delete it, then retry the run.",
                ) from None
        try:
            patch = objects.ownership(created)
            self._api.patch(self._api.path(SECRETS, order.name), patch)
        except (ApiError, NoAnswer):
            pass  # it is then deleted with `cancel`, or stays; it is useless after the attempt
        return order.name

    def cancel(self, numbers: Collection[str], *, kill: bool = False) -> None:
        """Delete the JobSets: SIGTERM, then SIGKILL after the grace, or at once with `kill`."""
        for name in sorted(numbers):
            try:
                if kill:
                    for pod in self._pods_of(name):
                        path = self._api.path(PODS, pod["metadata"]["name"])
                        self._api.delete(path, gracePeriodSeconds=0)
                self._api.delete(self._api.path(JOBSETS, name))
                self._api.delete(self._api.path(SECRETS, name))
            except ApiError as error:
                raise refused(error, f"delete JobSet {name}") from None

    def watch(self) -> dict[str, JobView]:
        """All JobSets of the engine, and those deleted within the last hour, by name."""
        jobsets, deleted = self._objects("jobsets")
        workloads, _ = self._objects("workloads")
        pods, ended_pods = self._objects("pods")
        by_owner = {
            str(owner.get("uid")): workload
            for workload in workloads
            for owner in workload["metadata"].get("ownerReferences") or []
        }
        by_job: dict[str, list[Any]] = {}
        for pod in (*ended_pods, *pods):
            by_job.setdefault(pod["jobset"], []).append(pod)
        result: dict[str, JobView] = {}
        newest = [one for one in deleted if time.time() - one["removed"] < _DELETED_FOR_S]
        for gone, listed in ((True, newest), (False, jobsets)):
            for jobset in listed:
                uid, name = str(jobset["metadata"]["uid"]), str(jobset["metadata"]["name"])
                own = by_job.get(name, [])
                if any(views.is_started(pod) for pod in own):
                    self._started.add(uid)
                result[name] = views.view(
                    jobset, by_owner.get(uid), own, gone=gone, has_started=uid in self._started
                )
        self._started &= {str(one["metadata"]["uid"]) for one in (*jobsets, *newest)}
        return result

    def lookup(self, *, number: str, name: str) -> JobView | None:
        """A job that no informer lists: Kubernetes loses no objects, so one is gone if deleted."""
        del number
        stored = self._get(JOBSETS, name)
        jobset = (
            views.trim_jobset(stored) if stored else {"metadata": {"name": name}, "suspend": False}
        )
        return views.view(jobset, None, self._pods_of(name), gone=stored is None)

    def capacity(self) -> Capacity:
        """LocalQueues of the namespace; quotas and nodes if the control plane may read them."""
        try:
            version = str(self._api.get("/version").get("gitVersion", "")).removeprefix("v")
            namespace = self.settings.namespace
            kueue = f"{_KUEUE}/{self._kueue_version()}"
            listed, _ = self._api.items(f"{kueue}/namespaces/{namespace}/localqueues")
        except ApiError as error:
            raise refused(error, "read the queues of Kueue") from None
        clusters = {
            one["metadata"]["name"]: one for one in self._optional(f"{kueue}/clusterqueues")
        }
        nodes = self._optional("/api/v1/nodes")
        return Capacity(version, queues.partitions(listed, clusters, nodes, _GPU))

    def explain(self, view: JobView, pool: Mapping[str, object]) -> str:
        """Why a pending job waits."""
        sentence = reasons.waiting(view, str(pool.get("queue", "")))
        words = f" (Kubernetes: {view.reason})" if view.reason else ""
        return f"Job {view.number} waits in Kubernetes: {sentence}{words}."

    def _objects(self, kind: str) -> tuple[list[Any], list[Any]]:
        informer = self._informers.get(kind)
        if informer is None:
            informer = self._informers[kind] = self._informer(kind)
        return informer.objects(wait_s=self.settings.timeout_s)

    def _informer(self, kind: str) -> Informer:
        own = objects.selector(self._name)
        if kind == "workloads":
            namespace = self.settings.namespace
            path = f"{_KUEUE}/{self._kueue_version()}/namespaces/{namespace}/workloads"
            return Informer(self._api, path, trim=views.trim_workload, selector="")
        template, trim = {
            "jobsets": (JOBSETS, views.trim_jobset),
            "pods": (PODS, views.trim_pod),
        }[kind]
        return Informer(self._api, self._api.path(template), trim=trim, selector=own)

    def _kueue_version(self) -> str:
        if not self._kueue:
            try:
                group = self._api.get(_KUEUE)
            except ApiError as error:
                if error.code == 404:
                    raise EngineUnavailable(
                        "The cluster has no Kueue (kueue.x-k8s.io). Install Kueue and JobSet."
                    ) from None
                raise refused(error, "find the version of Kueue") from None
            served = [str(one.get("version")) for one in group.get("versions") or []]
            known = [version for version in _KNOWN_KUEUE if version in served]
            if not known:
                raise EngineUnavailable(
                    f"Kueue serves {', '.join(served)}; Orrery knows {', '.join(_KNOWN_KUEUE)}."
                )
            self._kueue = known[0]
        return self._kueue

    def _require_queue(self, order: Order) -> None:
        queue = str(order.pool.get("queue", ""))
        namespace = self.settings.namespace
        path = f"{_KUEUE}/{self._kueue_version()}/namespaces/{namespace}/localqueues/{queue}"
        try:
            self._api.get(path)
        except NoAnswer as error:
            raise SubmissionDelayed(str(error)) from None
        except ApiError as error:
            if error.code == 404:
                raise SubmissionRefused(
                    f"namespace {namespace} has no LocalQueue {queue}",
                    "Correct `queue` of the pool, choose another pool, or create the queue.",
                ) from None
            raise SubmissionDelayed(str(refused(error, f"read LocalQueue {queue}"))) from None

    def _create_secret(self, body: dict[str, Any]) -> None:
        path, name = self._api.path(SECRETS), body["metadata"]["name"]
        try:
            try:
                self._api.create(path, body)
            except ApiError as error:
                if error.code != 409:
                    raise
                self._api.delete(self._api.path(SECRETS, name))  # of an earlier, lost submission
                self._api.create(path, body)
        except NoAnswer as error:
            raise SubmissionDelayed(str(error)) from None
        except ApiError as error:
            raise _submission_error(error) from None

    def _discard_secret(self, name: str) -> None:
        with contextlib.suppress(ApiError, NoAnswer):
            self._api.delete(self._api.path(SECRETS, name))

    def _pods_of(self, name: str) -> list[Any]:
        existing, removed = self._objects("pods")
        return [pod for pod in (*removed, *existing) if pod["jobset"] == name]

    def _get(self, template: str, name: str) -> dict[str, Any] | None:
        try:
            return self._api.get(self._api.path(template, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise refused(error, f"read {name}") from None

    def _optional(self, path: str) -> list[dict[str, Any]]:
        """All objects of a list of the whole cluster; none if it may not be read."""
        try:
            return self._api.items(path)[0]
        except ApiError:
            return []


def _submission_error(error: ApiError) -> Exception:
    if error.code in (401, 409):
        return SubmissionDelayed(str(refused(error, "create objects")))
    text = f"{error.code} {error}"
    if error.code == 403 and "exceeded quota" in str(error):
        return SubmissionDelayed(text)
    return SubmissionRefused(text, reasons.refusal_hint(error.code, str(error)))


def _login(settings: KubernetesSettings, access: KubernetesAccess) -> Login:
    if access.kubeconfig:
        login = read(access.kubeconfig)
        return Login(**{**login.__dict__, "server": settings.server or login.server})
    if access.token:
        if settings.server is None:
            raise EngineUnavailable(
                "The engine has a token and no server: set server=https://…:6443"
            )
        return Login(server=settings.server, ca=access.ca, token=access.token)
    return in_cluster()
