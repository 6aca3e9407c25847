"""Plays what Kueue, the JobSet controller and kubelets do with JobSets on the API server.

With `run_pods` each pod is a real process with the environment that its template describes.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.kubernetes.api_server import ApiServer, now

Object = dict[str, Any]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what other threads do; the limit is for a hang only."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Cluster:
    """One namespace with LocalQueue `default`. `admits`: Kueue admits each JobSet at once."""

    def __init__(self, *, run_pods: bool = False, admits: bool = False) -> None:
        self.api = ApiServer()
        self.api.on_created = self._on_created
        self._run_pods, self._admits = run_pods, admits
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[str] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        queue = {"metadata": {"name": "default"}, "spec": {"clusterQueue": "all"}}
        status = {"pendingWorkloads": 1, "admittedWorkloads": 2}
        self.api.put("localqueues", {**queue, "status": status})
        resources = [{"name": "cpu", "nominalQuota": "8"}]
        groups = [{"flavors": [{"name": "any", "resources": resources}]}]
        usage = [{"name": "any", "resources": [{"name": "cpu", "total": "2500m"}]}]
        cluster_queue: Object = {"metadata": {"name": "all"}, "spec": {"resourceGroups": groups}}
        self.api.put("clusterqueues", {**cluster_queue, "status": {"flavorsUsage": usage}})
        ready = [{"type": "Ready", "status": "True"}]
        node = {"metadata": {"name": "kn1"}, "spec": {}}
        allocatable = {"cpu": "4", "memory": "16Gi"}
        status = {"allocatable": allocatable, "conditions": ready}
        self.api.put("nodes", {**node, "status": status})

    def kubeconfig(self, **user: str) -> str:
        user = user or {"token": self.api.token}
        lines = [
            "apiVersion: v1",
            "kind: Config",
            "current-context: test",
            "contexts: [{name: test, context: {cluster: c, user: u}}]",
            f"clusters: [{{name: c, cluster: {{server: '{self.api.url}'}}}}]",
            f"users: [{{name: u, user: {user}}}]",
        ]
        return "\n".join(lines)

    def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for thread in self._threads:
            thread.join(30)
        self.api.close()

    def jobsets(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.api.items("jobsets")]

    def set_conditions(
        self, name: str, *conditions: tuple[str, str, str, str], **spec: Any
    ) -> None:
        """Set conditions (type, status, reason, message) of the JobSet's Workload."""
        listed = [
            {"type": kind, "status": status, "reason": reason, "message": message}
            for kind, status, reason, message in conditions
        ]
        for one in listed:
            one["lastTransitionTime"] = now()
        self.api.change("workloads", f"jobset-{name}", status={"conditions": listed}, spec=spec)

    def admit(self, name: str, *, starts: bool = True) -> None:
        """Kueue admits the JobSet, and its pods are created; `starts`: their containers too."""
        self.set_conditions(
            name,
            ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue all"),
            ("Admitted", "True", "Admitted", "The workload is admitted"),
        )
        jobset = self.api.change("jobsets", name, spec={"suspend": False})
        template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        for rank in range(template["completions"]):
            labels = template["template"]["metadata"]["labels"]
            own = {"jobset.sigs.k8s.io/jobset-name": name}
            count = len(self._logs)
            self._logs.append("")
            metadata = {
                "name": f"{name}-nodes-0-{rank}-{count}",
                "labels": {**labels, **own},
                "annotations": {"batch.kubernetes.io/job-completion-index": str(rank)},
            }
            status: Object = {"phase": "Pending"}
            pod = {"metadata": metadata, "spec": template["template"]["spec"], "status": status}
            pod = self.api.put("pods", pod)
            if starts:
                self.start_pod(pod["metadata"]["name"])

    def start_pod(self, name: str) -> None:
        pod = self.api.get("pods", name)
        rank = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
        container = {"name": "supervisor", "state": {"running": {"startedAt": now()}}}
        status = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [container]}
        node = {"nodeName": f"kn{int(rank) + 1}"}
        if self._run_pods:
            self._start_process(pod, rank)
        self.api.change("pods", name, status=status, spec=node)
        if self._run_pods:
            thread = threading.Thread(target=self._await_process, args=(name,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def pod_waits(self, name: str, reason: str, message: str) -> None:
        """A container of the JobSet's first pod waits, for example for its image."""
        pod = self.pods_of(name)[0]
        waiting = {"waiting": {"reason": reason, "message": message}}
        status = {"containerStatuses": [{"name": "supervisor", "state": waiting}]}
        self.api.change("pods", pod["metadata"]["name"], status=status)

    def pods_of(self, name: str) -> list[Object]:
        label = "jobset.sigs.k8s.io/jobset-name"
        return [one for one in self.api.items("pods") if one["metadata"]["labels"][label] == name]

    def living(self) -> list[str]:
        """Names of pods whose processes run."""
        with self._lock:
            return [name for name, one in self._processes.items() if one.poll() is None]

    def kill_pod(self, name: str) -> None:
        """SIGKILL to the pod's first process; its ranks die with it."""
        with self._lock:
            self._processes[name].kill()

    def evict(self, name: str, reason: str, message: str, detail: str = "") -> None:
        """Kueue takes the quota back: the JobSet is suspended and its pods are stopped."""
        conditions = [
            ("QuotaReserved", "False", "Pending", message),
            ("Evicted", "True", reason, message),
        ]
        if detail:
            conditions.append(("Preempted", "True", detail, message))
        active = not reason.startswith("Deactivated")
        self.set_conditions(name, *conditions, active=active)
        self.api.change("jobsets", name, spec={"suspend": True})
        self.stop_pods(name)

    def stop_pods(self, name: str) -> None:
        """SIGTERM to all pods; each is removed when its process has ended."""
        for pod in self.pods_of(name):
            own = pod["metadata"]["name"]
            with self._lock:
                process = self._processes.get(own)
            if process is None:
                self.api.remove("pods", own)
                continue
            self.api.change("pods", own, metadata={"deletionTimestamp": now()})
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def end_pod(self, name: str, rank: int = 0, *, status: Object | None = None) -> None:
        """The JobSet's pod ends, with a phase and reasons in `status`."""
        pod = next(
            one
            for one in self.pods_of(name)
            if one["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
            == str(rank)
        )
        self.api.change("pods", pod["metadata"]["name"], status=status or {"phase": "Succeeded"})

    def conclude(
        self, name: str, kind: str = "Completed", reason: str = "AllJobsCompleted"
    ) -> None:
        one = {"type": kind, "status": "True", "reason": reason, "message": "", "x": now()}
        self.api.change("jobsets", name, status={"conditions": [one]})

    def _on_created(self, event: str, item: Object) -> None:
        if event == "delete jobsets":
            self.stop_pods(item["name"])
        if event == "delete pods":
            with self._lock:
                process = self._processes.get(item["name"])
            if process is not None:
                process.kill()
        if event != "jobsets":
            return
        name = item["metadata"]["name"]
        owner = {"kind": "JobSet", "name": name, "uid": item["metadata"]["uid"]}
        metadata = {"name": f"jobset-{name}", "ownerReferences": [owner]}
        queue = item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        self.api.put("workloads", {"metadata": metadata, "spec": {"queueName": queue}})
        self.set_conditions(
            name, ("QuotaReserved", "False", "Pending", "insufficient unused quota for cpu")
        )
        if self._admits:
            thread = threading.Thread(target=self._admit_soon, args=(name,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _admit_soon(self, name: str) -> None:
        with self.api.changed:
            self.api.changed.wait_for(lambda: self._has_secret(name), timeout=20)
        self.admit(name)

    def _has_secret(self, name: str) -> bool:
        return any(one["metadata"]["name"] == name for one in self.api.items("secrets"))

    def _start_process(self, pod: Object, rank: str) -> None:
        [container] = pod["spec"]["containers"]
        environ = {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": rank}
        environ |= {"OMP_NUM_THREADS": "1"}
        for variable in container["env"]:
            environ[variable["name"]] = self._value(variable, pod)
        environ["ORRERY_JOB_HOST"] = "127.0.0.1"  # what the cluster's DNS answers for this name
        process = subprocess.Popen(
            container["command"],
            cwd=container["workingDir"],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
            start_new_session=True,
        )
        with self._lock:
            self._processes[pod["metadata"]["name"]] = process

    def _value(self, variable: Object, pod: Object) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable["value"])
        if reference := source.get("secretKeyRef"):
            secret = self.api.get("secrets", reference["name"])
            data = secret.get("data") or {}
            if reference["key"] in data:
                return base64.b64decode(data[reference["key"]]).decode()
            return str(secret["stringData"][reference["key"]])
        path = source["fieldRef"]["fieldPath"]
        return {"metadata.uid": pod["metadata"]["uid"], "status.podIP": "127.0.0.1"}[path]

    def _await_process(self, name: str) -> None:
        with self._lock:
            process = self._processes[name]
        code = process.wait()
        with self._lock, contextlib.suppress(Exception):
            pod = self.api.get("pods", name)
            if "deletionTimestamp" in pod["metadata"]:
                self.api.remove("pods", name)
                return
            ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
            container = {"name": "supervisor", "state": {"terminated": ended}}
            phase = "Succeeded" if code == 0 else "Failed"
            status = {**pod["status"], "phase": phase, "containerStatuses": [container]}
            self.api.change("pods", name, status=status)
            job = pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]
            phases = [one["status"]["phase"] for one in self.pods_of(job)]
            if "Failed" in phases:
                self.conclude(job, "Failed", "FailedJobs")
            elif set(phases) == {"Succeeded"}:
                self.conclude(job)
