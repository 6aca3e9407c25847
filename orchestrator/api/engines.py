"""Engines: clusters with a scheduler of their own (Slurm, Kubernetes), and their pools."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Time
from orchestrator.fleet.cluster_engines import services as engines
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


class NewEngine(Contract):
    """An engine to add; docs/install.md lists the settings."""

    name: Annotated[str, Field(min_length=1, max_length=20)]
    kind: str = "slurm"
    settings: dict[str, Any] = {}
    credentials: Annotated[
        dict[str, Any],
        Field(
            description="{redis_url?, rest_token?, kubeconfig?, token?, ca?}: how nodes reach the "
            "broker; how to log in to slurmrestd or Kubernetes. Stored encrypted"
        ),
    ] = {}


class EngineChange(Contract):
    """What to change; null keeps it. Disabled engines get no new jobs."""

    settings: dict[str, Any] | None = None
    credentials: dict[str, Any] | None = None
    enabled: bool | None = None


class PoolSettings(Contract):
    """What the pool means: in Slurm {partition, account, qos, …}, in Kubernetes {queue, …}."""

    settings: dict[str, Any]


class QuotaOut(Schema):
    """How much of a resource a queue uses."""

    resource: str
    used: float
    total: float | None = Field(description="null: not readable")


class PartitionOut(Schema):
    """A partition or queue of the engine, as last read."""

    name: str
    nodes: int
    nodes_idle: int
    cpus_per_node: int
    gpus_per_node: int
    gpu_type: str
    memory_mb: int
    limit_s: int | None
    up: bool
    waiting: int | None = Field(None, description="jobs; null: not known")
    running: int | None = None
    quota: list[QuotaOut] = []


class EngineOut(Schema):
    """An engine with its pools; credentials are never shown."""

    name: str
    kind: str
    enabled: bool
    settings: dict[str, Any]
    created: Time
    ok: bool | None = Field(description="null: not contacted yet")
    message: str
    problem: str = Field("", description="what to correct though the engine answers")
    version: str | None
    contacted: Time | None
    partitions: list[PartitionOut]
    pools: list[dict[str, Any]] = Field(description="[{name, partition or queue, …}]")


@router.get("", response=list[EngineOut], auth=require_scope("read"), summary="List engines")
@paginated(name="engines", serialize=engines.serialize_engine)
def listed(request: HttpRequest) -> Any:
    """Engines with state, version, partitions and pools."""
    return engines.engines_visible_to(user=user(request)).order_by("id")


@router.post("", response={201: EngineOut}, auth=require_scope("admin"), summary="Add an engine")
@creates(EngineOut)
def add(request: HttpRequest, body: NewEngine) -> dict[str, Any]:
    """Adds an engine; the scheduler contacts it within seconds."""
    engine = engines.engine_add(
        by=user(request),
        name=body.name,
        kind=body.kind,
        settings=body.settings,
        credentials=body.credentials,
    )
    return engines.serialize_engine(engine)


@router.get("/{name}", response=EngineOut, auth=require_scope("read"), summary="Get an engine")
def get(request: HttpRequest, name: str) -> dict[str, Any]:
    """One engine by name."""
    return engines.serialize_engine(engines.engine_get(user=user(request), name=name))


@router.patch(
    "/{name}", response=EngineOut, auth=require_scope("admin"), summary="Change an engine"
)
def change(request: HttpRequest, name: str, body: EngineChange) -> dict[str, Any]:
    """Merges settings, replaces the login, enables or disables new jobs."""
    engine = engines.engine_update(
        engine=engines.engine_get(user=user(request), name=name),
        by=user(request),
        settings=body.settings,
        credentials=body.credentials,
        enabled=body.enabled,
    )
    return engines.serialize_engine(engine)


@router.delete(
    "/{name}", response={204: None}, auth=require_scope("admin"), summary="Remove an engine"
)
def remove(request: HttpRequest, name: str) -> HttpResponse:
    """Removes an engine without pools."""
    engines.engine_remove(
        engine=engines.engine_get(user=user(request), name=name), by=user(request)
    )
    return HttpResponse(status=204)


@router.put(
    "/{name}/pools/{pool}",
    response=EngineOut,
    auth=require_scope("admin"),
    summary="Set a pool of an engine",
)
def set_pool(request: HttpRequest, name: str, pool: str, body: PoolSettings) -> dict[str, Any]:
    """Lets the engine schedule the pool's runs."""
    engine = engines.engine_get(user=user(request), name=name)
    engines.engine_pool_set(engine=engine, by=user(request), pool=pool, settings=body.settings)
    return engines.serialize_engine(engines.engine_get(user=user(request), name=name))


@router.delete(
    "/{name}/pools/{pool}",
    response={204: None},
    auth=require_scope("admin"),
    summary="Take a pool from an engine",
)
def remove_pool(request: HttpRequest, name: str, pool: str) -> HttpResponse:
    """The pool keeps its name and belongs to Orrery's own scheduler."""
    engine = engines.engine_get(user=user(request), name=name)
    engines.engine_pool_remove(engine=engine, by=user(request), pool=pool)
    return HttpResponse(status=204)
