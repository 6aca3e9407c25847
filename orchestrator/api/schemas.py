"""The shapes of answers, one a noun, as OpenAPI shows them. Times are ISO 8601 in UTC, sizes bytes,
durations seconds.

Shapes only: which rows there are, and who sees them, the selectors know.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from django.utils import timezone
from ninja import Schema
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from orchestrator.common.units import iso
from workers.contracts.wire.samples import WrittenText

Item = TypeVar("Item")
Id = Annotated[str, BeforeValidator(str)]  # a whole number as text
Time = Annotated[
    str,
    BeforeValidator(lambda time: iso(time) if isinstance(time, datetime) else time),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class PageOf(Schema, Generic[Item]):
    """One page of a list; `next_cursor` is null on the last."""

    items: list[Item]
    next_cursor: str | None = None


def aware(time: datetime | None) -> datetime | None:
    """A time that a caller gave, UTC where it names no zone."""
    return (
        timezone.make_aware(time, timezone.get_default_timezone())
        if time and timezone.is_naive(time)
        else time
    )


class RunOut(Schema):
    model_config = ConfigDict(extra="allow")

    id: Id = Field(description="the number in /api/v1/runs/{id}, as text")
    name: str
    kind: str
    state: str = Field(
        description="queued, starting, running, stopping, paused, finished, failed or cancelled"
    )
    spec: dict[str, Any] = Field(
        description="as given, defaults left out", json_schema_extra={"x-contract": "RunSpec"}
    )
    plan: dict[str, Any] | None = Field(
        description="the ParallelPlan it runs with; null for external runs"
    )
    attempt: int = Field(description="number of the newest attempt, 0 before the first")
    owner: str
    experiment: str | None
    created: Time
    started: Time | None
    ended: Time | None
    prediction: dict[str, Any] | None
    exit: dict[str, Any] | None = Field(
        description="{class, reason, rank?, step?} of a run that ended"
    )
    priority: int
    tags: list[str]
    notes: str
    devices: int = Field(description="devices it occupies; 0 for external runs")
    wait_reason: str | None = Field(description="why it waits, while it waits")
    summary: dict[str, Any] = Field(
        description="newest headline numbers: step, steps, loss, tokens_per_s, mfu, eta_s"
    )
    forked_from: str | None
    version: int = Field(description="counts people's edits; the ETag carries it")


class AttemptOut(Schema):
    run: str
    attempt: int
    state: str
    exit_class: str | None
    exit: dict[str, Any] | None
    placement: list[dict[str, Any]] = Field(description="[{node, address, devices, node_rank}]")
    resume_from: dict[str, Any] | None
    created: Time
    launched: Time | None
    started: Time | None
    ended: Time | None


class EventOut(Schema):
    run: str
    attempt: int
    rank: int | None
    seq: int = Field(description="counts per run")
    time: float = Field(description="Unix seconds")
    type: str
    data: dict[str, Any]


class CheckpointOut(Schema):
    id: Id
    run: str
    attempt: int
    step: int
    tokens: int
    path: str
    bytes: int
    created: Time
    deleted: Time | None


class ArtifactOut(Schema):
    id: Id
    run: str
    name: str
    path: str
    bytes: int
    created: Time


class SamplesOut(Schema):
    step: int
    attempt: int | None
    time: Time
    samples: list[WrittenText] = Field(description="what the model wrote after each prompt")
    temperature: float | None
    seconds: float | None
    cut_short: bool = Field(description="the time for writing was over")


class LogLine(Schema):
    attempt: int
    rank: int = Field(description="-1: the supervisor's own lines")
    seq: int
    time: Time
    text: str
    cursor: str = Field(description="give it as `after` to go on behind this line")


class DeviceOut(Schema):
    id: Id
    node: str
    index: int
    kind: str = Field(description="gpu or cpu")
    name: str
    catalogue: str | None = Field(description="its entry in the device catalogue")
    memory_bytes: int
    uuid: str | None
    healthy: bool
    sample: dict[str, Any] | None = Field(description="its newest reading")


class NodeOut(Schema):
    id: Id
    name: str
    cluster: str
    pool: str
    address: str
    hostname: str
    health: str = Field(description="up, silent (unknown, not failed) or lost")
    drained: bool
    drain_reason: str
    joined: Time
    last_heartbeat: Time | None
    cores: int | None
    memory_bytes: int | None
    versions: dict[str, str]
    devices: list[DeviceOut]


class PoolOut(Schema):
    id: Id
    name: str
    max_devices_per_user: int | None
    priority: int
    node_count: int
    device_count: int = Field(description="healthy devices of nodes that take work")


class ExperimentOut(Schema):
    id: Id
    name: str
    hypothesis: str
    notes: str
    owner: str
    pinned: list[str]
    created: Time


class TokenOut(Schema):
    id: Id
    name: str
    prefix: str
    scopes: list[str]
    created: Time
    expires: Time | None
    last_used: Time | None
    revoked: Time | None


class NewTokenOut(TokenOut):
    token: str = Field(description="shown this once; only its digest is kept")


class MeOut(Schema):
    id: Id
    username: str
    role: str
    scopes: list[str]
    teams: list[str]
    token: str | None = Field(description="name of the token that this call came with")


class AuditOut(Schema):
    id: Id
    time: Time
    actor: str
    action: str
    target: str
    data: dict[str, Any]
    ip: str | None

    @staticmethod
    def resolve_actor(entry: Any) -> str:
        return str(entry.actor_name)


class QueueOut(Schema):
    run: str
    name: str
    owner: str
    devices: int
    pool: str
    priority: int
    queued_at: Time
    position: int = Field(description="1 is next")
    reason: str = Field(description="why it waits")
    may_start: Time | None = Field(description="when it may start, if that can be told")


class SeriesName(Schema):
    name: str
    unit: str
    ranks: list[int]
    attempts: list[int]
    points: int = Field(description="of all its ranks and attempts together")


class SeriesNames(PageOf[SeriesName]):
    """The metrics that a run has so far."""


Number = float | str  # numbers that are not finite are "NaN", "Infinity", "-Infinity"


class SeriesOut(Schema):
    name: str
    unit: str
    rank: int | None
    attempt: int | None = Field(description="the newest attempt among the points")
    axis: str
    x: list[Number]
    y: list[Number]
    low: list[Number] | None = Field(
        None, description="where points were left out: the least of each point's bucket"
    )
    high: list[Number] | None = Field(None, description="and the greatest")
    total_points: int
    last_seq: int


class Rejected(Schema):
    index: int = Field(description="position in the call")
    message: str


class IngestOut(Schema):
    accepted: int
    duplicates: int
    rejected: list[Rejected]


class Preset(Schema):
    name: str
    parameters: int | None = None
    spec: dict[str, Any]


class PresetsOut(Schema):
    models: list[Preset]
    devices: list[dict[str, Any]]
    data: list[str]


class CalibrationOut(Schema):
    id: Id
    name: str
    device: str = Field(description="catalogue name of most of its measurements")
    framework: str
    rows: int = Field(description="measurements it was fitted to")
    default: bool = Field(description="predictions of runs on its device rest on it")
    created_by: str
    created: Time
    fitted: Time
    version: int
    document: dict[str, Any] | None = Field(
        None, description="as `manage.py calibrate` writes it; left out in lists"
    )


class DeviceTypeOut(Schema):
    id: Id
    name: str
    owner: str
    created: Time
    entry: dict[str, Any] = Field(json_schema_extra={"x-contract": "Device"})


class SavedPlanOut(Schema):
    id: Id
    name: str
    owner: str
    created: Time
    line: dict[str, Any] = Field(description="a request line for plans/estimate")
    link: str | None


class EstimateOut(Schema):
    """An answer line; with `explain` each number is a tree `{name, value, unit, formula, inputs,
    source}`.
    """

    model_config = ConfigDict(extra="allow")

    id: Any = None
    ok: bool = Field(True, description="the plan is legal")
    problems: list[dict[str, str]] = Field(
        [], description="[{field, says, try}] of an illegal plan"
    )
    fits: bool | None = None
    memory: dict[str, Any] | None = Field(
        None, description="bytes by category on the worst pipeline rank, and totals"
    )
    host: dict[str, Any] | None = Field(
        None, description="bytes that offloading puts into a host's memory, a device"
    )
    step_time_s: Any = None
    step_time_low_s: Any = Field(None, description="with step_time_high_s an 80% interval")
    step_time_high_s: Any = None
    time: dict[str, Any] | None = None
    tokens_per_s_per_device: Any = None
    tflops_per_device: Any = Field(None, description="model FLOPs")
    mfu: Any = None
    hfu: Any = None
    bubble_fraction: Any = None
    comm: dict[str, Any] | None = Field(
        None, description="bytes a device and step, by kind of parallelism"
    )
    collectives: dict[str, Any] | None = Field(
        None,
        description=(
            "bytes a rank hands to each kind of collective; null where these are not counted"
        ),
    )
    notes: list[str] = Field([], description="what to know before taking the plan")
    explained: dict[str, Any] | None = Field(
        None, description="trees of the numbers that `explain` names"
    )
    usd_per_billion_tokens: Any = None
    days: Any = Field(None, description="for workload.tokens, null without them")
    calibration: str | None = None
    answers: list[dict[str, Any]] | None = Field(
        None, description="one a line, where `requests` were sent"
    )


class SearchOut(Schema):
    model_config = ConfigDict(extra="allow")

    enumerated: int = Field(description="legal candidates")
    legal: int
    fit: int
    seconds: float
    plans: list[dict[str, Any]] = Field(description="[{plan, …the answer}], best first")
    pareto: list[int] = Field(description="positions in `plans`")
    rejected: dict[str, int] = Field(description="how many plans were left out, by reason")
    notes: list[str] = Field(
        [], description="what the search left out, and what to know of its plans"
    )
    closest: dict[str, Any] | None = Field(
        None, description="where nothing fits: the plan that needs least"
    )
    advice: list[dict[str, Any]] | None = Field(
        None, description="and single changes that would make one fit"
    )


class ExportOut(Schema):
    engine: str
    filename: str
    text: str
    notes: list[str]


class ServingOut(Schema):
    model_config = ConfigDict(extra="allow")
