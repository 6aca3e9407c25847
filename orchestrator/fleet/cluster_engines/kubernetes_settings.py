"""Settings of Kubernetes engines and of their pools. Does not contact a cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from orchestrator.fleet.cluster_engines.kubeconfig import read
from orchestrator.fleet.cluster_engines.settings import absolute_path
from workers.contracts.base import Contract

_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"

Label = Annotated[str, Field(pattern=_LABEL, max_length=63)]
Name = Annotated[str, Field(pattern=_NAME, max_length=253)]
Key = Annotated[str, Field(pattern=_KEY, max_length=317)]
Image = Annotated[str, Field(pattern=_IMAGE, max_length=512)]
Path = Annotated[str, AfterValidator(absolute_path)]


def _server(text: str) -> str:
    loopback = ("http://127.0.0.1", "http://localhost", "http://[::1]")
    if not text.startswith(("https://", *loopback)) or any(c.isspace() for c in text):
        raise ValueError(f"{text!r} is not an https:// address of a Kubernetes API server")
    return text.rstrip("/")


class Mount(Contract):
    """A persistent volume claim that pods mount, for example with data sets."""

    claim: Name
    path: Path
    read_only: bool = True


class Toleration(Contract):
    """A taint that pods tolerate."""

    key: Key | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class KubernetesSettings(Contract):
    """Where jobs run and what their pods are.

    `claim`: a persistent volume claim that all nodes can mount (ReadWriteMany); runs and their
    checkpoints are in it, at `home`. `server`: default from the kubeconfig, else the cluster in
    which the control plane runs. `run_as_user` and `run_as_group`: numbers under which pods run.
    """

    server: Annotated[str, AfterValidator(_server)] | None = None
    namespace: Label = "orrery"
    image: Image
    image_pull_secret: Name | None = None
    claim: Name
    home: Path = "/var/lib/orrery"
    mounts: list[Mount] = []
    python: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$")] = "python"
    source: Path = "/opt/orrery"
    service_account: Name = "default"
    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    run_as_group: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    shm_gib: Annotated[float, Field(gt=0, le=4096)] = 8.0
    poll_s: Annotated[float, Field(ge=0.5, le=60)] = 3.0
    timeout_s: Annotated[float, Field(ge=1, le=120)] = 15.0
    stop_grace_s: Annotated[float, Field(ge=1, le=3600)] = 30.0


class KubernetesPool(Contract):
    """What a pool means in Kubernetes: a LocalQueue of Kueue, and where its pods may run.

    `devices_per_node`: default by the nodes' GPUs or CPUs, if the control plane may list nodes.
    `topology`: a node label; all pods of a job run in one domain of it.
    """

    queue: Name
    priority_class: Name | None = None
    device: str | None = None
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    cpus_per_device: Annotated[int, Field(ge=1, le=1024)] | None = None
    memory_gb_per_device: Annotated[float, Field(gt=0, le=100_000)] | None = None
    gpu_resource: Key = "nvidia.com/gpu"
    image: Image | None = None
    node_selector: dict[Key, str] = {}
    tolerations: list[Toleration] = []
    topology: Key | None = None

    @property
    def target(self) -> str:
        """The queue."""
        return self.queue


class KubernetesAccess(Contract):
    """How to log in: a kubeconfig, or a token and the authority's certificates.

    Neither: the service account of the pod that the control plane runs in.
    """

    redis_url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://\S+$")] | None = None
    kubeconfig: Annotated[str, Field(max_length=200_000)] | None = None
    token: Annotated[str, Field(pattern=r"^\S+$", max_length=20_000)] | None = None
    ca: Annotated[str, Field(max_length=200_000)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> KubernetesAccess:
        if self.kubeconfig is not None and (self.token or self.ca):
            raise ValueError("give a kubeconfig, or a token and a certificate, not both")
        if self.kubeconfig is not None:
            read(self.kubeconfig)
        if self.ca is not None and "BEGIN CERTIFICATE" not in self.ca:
            raise ValueError("`ca` is not a certificate in PEM format")
        return self
