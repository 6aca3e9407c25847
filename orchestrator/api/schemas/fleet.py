"""Responses about nodes, devices and pools."""

from __future__ import annotations

from typing import Any, Literal

from ninja import Schema
from pydantic import Field

from orchestrator.api.schemas.base import Id, Time
from workers.contracts.wire.node_messages import Isolation


class CompatibilityOut(Schema):
    """How far the versions of a node's agent and of the control plane differ."""

    skew: str = Field(
        description="same; minor: works, with a warning; refused: the node gets no new work"
    )
    message: str
    hint: str


class SupervisorsOut(Schema):
    """Supervisors of one release on a node."""

    release: str
    wire: str
    attempts: int
    skew: str


class DeviceOut(Schema):
    """An accelerator or a CPU slot of a node."""

    id: Id
    node: str
    index: int
    kind: str = Field(description="gpu or cpu")
    name: str
    catalogue: str | None = Field(description="its name in the device catalogue")
    memory_bytes: int
    uuid: str | None
    healthy: bool = Field(description="only healthy devices get work")
    problem: str | None = Field(description="why it is not healthy")
    slow: dict[str, Any] | None = Field(
        description="the newest gang that waited for it: run, attempt, rank, late_s per step, "
        "share of the time, and the number of such runs"
    )
    sample: dict[str, Any] | None = Field(
        description="the newest reading: utilization, memory, power, temperature, throttling"
    )


class CordonOut(Schema):
    """A node or device that gets no work until the cordon is lifted."""

    device: int | None = Field(description="index; null: the whole node")
    cause: str = Field(description="operator, failures, preflight or slow")
    reason: str
    data: dict[str, Any] = Field(description="measured numbers")
    created: Time
    created_by: str | None = Field(description="null: the control plane")
    lifted: Time | None
    lifted_by: str | None


class ProbeOut(Schema):
    """A rate that a preflight probe measured."""

    time: Time
    run: Id
    attempt: int
    measure: str = Field(description="matmul, memory, all_reduce_node or all_reduce")
    device: int | None = Field(description="index; null: a collective")
    ranks: int = Field(description="that shared the cores or the collective")
    value: float = Field(description="operations or bytes per second")
    ok: bool = Field(description="false: below the node's record")


class NodeProbeOut(Schema):
    """What a probe of an idle node measured for the planner; the newest of a day."""

    id: Id
    day: str
    state: str = Field(description="requested, done or failed")
    requested: Time
    requested_by: str | None = Field(description="null: the control plane")
    time: Time | None = Field(description="of the result; null: no result")
    message: str | None = Field(description="why the newest request of the day failed")
    version: int | None
    short: bool | None = Field(description="the probe before the first run")
    seconds: float | None
    ranks: int | None
    cores: int | None
    load: float | None = Field(description="share of the cores that other programs used before")
    versions: dict[str, str] | None
    link: dict[str, Any] | None
    rates: list[dict[str, Any]] = Field(
        description="{measure, setting, ranks, value, unit, seconds}"
    )
    steps: list[dict[str, Any]] = Field(description="training runs of a few steps")
    problems: list[str]


class SuspectOut(Schema):
    """Nodes to which the link is suspected: preflight probes of gangs with both were slow."""

    nodes: list[str]
    run: Id = Field(description="the run of the newest slow probe")
    time: Time
    all_reduce_bytes_per_s: float = Field(description="what that gang reached")


class NodeOut(Schema):
    """A machine of the fleet."""

    id: Id
    name: str
    cluster: str
    pool: str
    address: str
    hostname: str
    topology: str = Field("", description="path in the tree of switches: row-1/rack-3")
    health: str = Field(description="up, silent (unknown, not failed) or lost")
    drained: bool
    drain_reason: str
    cordons: list[CordonOut] = Field(description="open ones of the node and its devices")
    joined: Time
    last_heartbeat: Time | None
    clock_skew_s: float = Field(description="the node's clock minus the control plane's")
    release: str = Field(description="release of the node's agent")
    wire: str = Field(description="wire protocol of the agent, major.minor; empty: unreadable")
    compatibility: CompatibilityOut
    supervisors: list[SupervisorsOut] = Field(
        description="supervisors of running attempts whose wire protocol is not the control plane's"
    )
    loss_held: bool = Field(
        description="overdue, but so many nodes are that an operator must confirm the loss"
    )
    dropped_orders: int = Field(
        default=0,
        description="unreadable messages that the agent dropped from its queue since it started",
    )
    cores: int | None
    memory_bytes: int | None
    versions: dict[str, str]
    isolation: Isolation | None = None
    broker_user: Literal["own", "shared"] | None = Field(
        default=None,
        description="the broker's user of the agent: its own, limited to the node's keys, or "
        "credentials that nodes share; null: release 0.1, shared",
    )
    devices: list[DeviceOut]
    suspect: SuspectOut | None = Field(None, description="only in the answer of GET nodes/{id}")


class PoolOut(Schema):
    """A named share of the fleet."""

    id: Id
    name: str
    max_devices_per_user: int | None
    priority: int
    node_count: int
    device_count: int = Field(description="healthy devices of nodes that accept work")
