"""Messages between the control plane and a node: inventory, heartbeat, orders, reports, states.

Bodies only; `envelope` signs them and `names` has their queues and keys. Receivers ignore unknown
fields. Fields marked `Since` are left out for a receiver of an earlier version (`field_versions`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count, Positive
from workers.contracts.wire.field_versions import Since
from workers.contracts.wire.maintenance.data_sets import DataInput
from workers.contracts.wire.maintenance.plan_trials import TrialsOrder
from workers.contracts.wire.maintenance.preflight import Preflight
from workers.contracts.wire.maintenance.storage import CollectOrder
from workers.contracts.wire.maintenance.store import StoreAccess
from workers.contracts.wire.points import RunId, Time
from workers.contracts.wire.programs.program_files import ProgramOrder

Fence = Annotated[str, Field(min_length=1, max_length=64, coerce_numbers_to_str=True)]
# texts of `versions`; unreadable ones are refused by the rule there, not here
Release = Annotated[str, Field(max_length=40)]
WireText = Annotated[str, Field(max_length=40)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class RunState(StrEnum):
    """States of a run."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    """States of an attempt."""

    ASSIGNED = "assigned"
    LAUNCHING = "launching"
    RUNNING = "running"
    EXITED = "exited"


class DeviceInfo(WireContract):
    """One device of a node; `catalogue` is its name in the device catalogue, if known."""

    index: Count
    kind: Literal["gpu", "cpu"]
    name: str
    memory_bytes: Count
    uuid: str | None = None
    catalogue: str | None = None
    # of a CPU slot: its cores; of a GPU: the nearest cores of the node, if known
    cores: list[Count] | None = None
    # why it cannot be used; null: it can
    problem: Annotated[str | None, Since(1, 1)] = None


class DeviceSample(WireContract):
    """A reading of one device; `utilization` is a fraction; null: the device does not report it."""

    index: Count
    utilization: float | None = None
    memory_used_bytes: Count | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    processes: list[int] = []
    # why its clocks are reduced: heat or a power brake; null: they are not, or it is unknown
    throttled: Annotated[str | None, Since(1, 1)] = None


class NodeSample(WireContract):
    """A reading of the node itself; null: the node does not report it.

    Counters are in bytes since the node started. RDMA traffic bypasses the network counters.
    """

    cpu_utilization: float | None = None  # a fraction of all cores
    memory_used_bytes: Count | None = None
    # CPU packages and their memory, without GPUs; needs readable counters of the kernel (RAPL)
    power_w: float | None = None
    temperature_c: float | None = None  # the hottest CPU sensor
    received_bytes: Count | None = None
    sent_bytes: Count | None = None
    rdma_received_bytes: Count | None = None
    rdma_sent_bytes: Count | None = None


class Isolation(WireContract):
    """Under which user the node executes runs: method is agent, uids or account; `detail` says
    more. `container` and `limits` name what else separates them, if anything.
    """

    method: str
    detail: str = ""
    container: str | None = None
    limits: str | None = None


# `Isolation.limits` of a node that has Docker but no systemd
LIMITS_OF_IMAGES: Final = "memory, CPU time and processes of images, by Docker"


def supported(container: str | None, limits: str | None) -> frozenset[str]:
    """Which of `Resources.needs` a node with these fields of `Isolation` supports."""
    images = {"images"} if container else set()
    if limits and (limits != LIMITS_OF_IMAGES or images):
        images |= {"limits of images"} if limits == LIMITS_OF_IMAGES else _ALL_LIMITS
    return frozenset(images)


_ALL_LIMITS: Final = {"limits", "limits of images"}


TopologyPath = Annotated[str, Field(max_length=200)]


class NodeInventory(WireContract):
    """Hardware and software of a node.

    Peers reach it at `address`; `versions` has python, orrery, torch, driver.
    """

    name: NodeName
    address: str
    hostname: str
    cores: Positive
    memory_bytes: Count
    devices: list[DeviceInfo]
    versions: dict[str, str] = {}
    isolation: Annotated[Isolation | None, Since(1, 1)] = None
    # path in the tree of switches, such as row-1/rack-3, from the agent's option
    topology: Annotated[TopologyPath | None, Since(1, 1)] = None
    # which user of the broker it connects as: its own, limited to its keys, or one that nodes share
    broker_user: Annotated[Literal["own", "shared"] | None, Since(1, 1)] = None


class AttemptSeen(WireContract):
    """An attempt whose supervisor is alive on the node, and the supervisor's versions.

    A supervisor outlives its agent, so the versions of the two may differ.
    """

    fence: Fence
    state: AttemptState
    release: Annotated[Release | None, Since(1, 1)] = None
    wire: Annotated[WireText | None, Since(1, 1)] = None


class Heartbeat(WireContract):
    """Periodic sign of life of a node, with samples of its devices and its attempts."""

    node: NodeName
    time: Time
    samples: list[DeviceSample] = []
    attempts: list[AttemptSeen] = []
    # sent at an agent's start and on request of a probe
    inventory: NodeInventory | None = None
    # versions of the agent; null in release 0.1
    release: Annotated[Release | None, Since(1, 1)] = None
    wire: Annotated[WireText | None, Since(1, 1)] = None
    # unreadable messages that the agent dropped from its queue since it started
    dropped_orders: Annotated[Count | None, Since(1, 1)] = None
    machine: Annotated[NodeSample | None, Since(1, 1)] = None


class RankSlot(WireContract):
    """The node and device of one rank."""

    rank: Count
    local_rank: Count
    node: NodeName
    device: Count


class ResumeFrom(WireContract):
    """A checkpoint; `source` is the one that `path` is pinned from, for a fork's first attempt.

    `stored` is the key of its copy in the store, for a node that lacks it.
    """

    path: str
    step: Count
    source: str | None = None
    stored: Annotated[str | None, Since(1, 1)] = None


class Rendezvous(WireContract):
    """Rendezvous of torchrun's ranks; without a port the first node's supervisor publishes one."""

    host: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    # the first node; null: unknown, or a node of the attempt is of release 0.1
    node: Annotated[NodeName | None, Since(1, 1)] = None


class RunOwner(WireContract):
    """The user who submitted a run; the number decides the Unix user of its processes."""

    id: Count
    name: str


class LeftSupervisor(WireContract):
    """A supervisor of an ended attempt in a job of an engine, and its directory in the home.

    If it was killed, unsent telemetry may be left there.
    """

    node: NodeName
    run_dir: Annotated[str, Field(min_length=1, max_length=500)]


class LaunchOrder(WireContract):
    """Start one attempt's ranks on one node.

    `run_dir` and `resume_from.path` are relative to the node's home. `rank_offset` is the node's
    first global rank; ranks are numbered over nodes in `node_rank` order.
    """

    run: RunId
    run_name: str = ""
    kind: str
    attempt: Positive
    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    spec: dict[str, Any]
    plan: dict[str, Any] | None = None
    node_rank: Count = 0
    nodes: Positive = 1
    local_devices: list[Count]
    local_ranks: Positive
    world_size: Positive
    rank_offset: Count = 0
    run_dir: str
    resume_from: ResumeFrom | None = None
    shared_dir: str | None = None
    device_kind: Literal["gpu", "cpu"] = "cpu"
    # of the smallest granted device; null: unknown
    device_memory_bytes: Annotated[Count | None, Since(1, 1)] = None
    env: dict[str, str] = {}
    owner: Annotated[RunOwner | None, Since(1, 1)] = None
    # runs whose folders the spec names; the submitter had the right to see them
    reads: Annotated[list[RunId], Since(1, 1)] = []
    # variables of the ranks, encrypted under the node's secret for the purpose `secret_purpose()`
    secrets: Annotated[dict[str, str], Since(1, 1)] = {}
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    # a training run without progress of any rank for this time hangs
    hang_s: Annotated[float, Field(gt=0)] = 300.0
    # without contact to the broker for this long the attempt must have ended; None: no lease
    lease_s: Annotated[float | None, Field(gt=0), Since(1, 1)] = None
    rendezvous: Rendezvous = Rendezvous()
    # probe the devices before the ranks start; null: no probe
    preflight: Annotated[Preflight | None, Since(1, 1)] = None
    # plans to try before the run starts; null: none, or one was chosen
    trials: Annotated[TrialsOrder | None, Since(1, 1)] = None
    # where checkpoints and artifacts are copied to; null: nowhere
    store: Annotated[StoreAccess | None, Since(1, 1)] = None
    # the files of a script at its submit; null: it starts in `script.workdir` itself
    program: Annotated[ProgramOrder | None, Since(1, 1)] = None
    # data sets that the spec names; the node has them before the ranks start
    inputs: Annotated[list[DataInput], Since(1, 1)] = []
    # of a job in an engine, which has no agent: what to ship and to delete in the shared home
    left: Annotated[list[LeftSupervisor], Since(1, 1)] = []
    collect: Annotated[CollectOrder | None, Since(1, 1)] = None

    @property
    def store_purpose(self) -> str:
        """Ties the encrypted credentials of the store to this attempt."""
        return f"store of {self.fence}"

    @property
    def secret_purpose(self) -> str:
        """Ties the encrypted variables to this attempt."""
        return f"variables of {self.fence}"


class ControlOrder(WireContract):
    """Request an action of a running attempt; its ranks are killed after `grace_s` seconds."""

    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    action: Literal["cancel", "pause", "preempt", "checkpoint", "profile", "memory", "kill"]
    grace_s: Annotated[float, Field(ge=0)] = 30.0


class ProbeOrder(WireContract):
    """Request a node's inventory, whether it still has these attempts, or a measurement.

    The node answers with a heartbeat and reports; after `measure_s` seconds of measuring its
    devices with `NodeProbed`.
    """

    request: str
    fences: list[Fence] = []
    inventory: bool = False
    measure_s: Annotated[float | None, Field(gt=0, le=600), Since(1, 1)] = None


class KeepOrder(WireContract):
    """Pin the checkpoint `source` as `target`, so that its owner may delete it; both in `runs/`."""

    source: str
    target: str
    # of the run of `target`
    owner: Annotated[RunOwner | None, Since(1, 1)] = None


class AttemptReport(WireContract):
    """One numbered report of an attempt from one node.

    `data` of `exited`: `{class, reason, code?, rank?, step?, signal?, cause?}`; of `checkpoint`:
    `{step, tokens, path, bytes}`; of `artifact`: `{name, path, bytes}`; of `running`: `{ranks}`; of
    `event`: `{type, data, rank?}`.
    """

    attempt_id: Annotated[str, Field(coerce_numbers_to_str=True)]
    fence: Fence
    node: NodeName
    seq: Count
    time: Time
    type: Literal["launching", "running", "checkpoint", "artifact", "exited", "event"]
    data: dict[str, Any] = {}
