"""Nodes, devices, pools, draining, and join tokens for new nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_node
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import aware
from orchestrator.api.schemas.fleet import (
    CordonOut,
    DeviceOut,
    NodeOut,
    NodeProbeOut,
    PoolOut,
    ProbeOut,
)
from orchestrator.fleet import (
    broker_users,
    cordoning,
    cordons,
    node_health,
    node_probes,
    probe_history,
    selectors,
    services,
    suspect_links,
)
from orchestrator.scheduling import services as scheduling
from workers.contracts.base import Contract
from workers.contracts.wire.maintenance.node_probe import FULL_S, MOST_S

router = Router(tags=["fleet"])


class Drain(Contract):
    """Why a node is drained."""

    reason: Annotated[str, Field(max_length=200, description="shown on the node")] = ""


class Uncordon(Contract):
    """What to return to service."""

    device: Annotated[int, Field(ge=0, description="index; null: the node itself")] | None = None


class NewProbe(Contract):
    """A probe to start."""

    seconds: Annotated[float, Field(ge=1, le=MOST_S, description="time to measure")] = FULL_S


class NewCordon(Uncordon):
    """What to exclude from placement, and why."""

    reason: Annotated[str, Field(max_length=300, description="shown on the node")] = ""


class Topology(Contract):
    """A node's place; empty: unknown."""

    path: Annotated[str, Field(max_length=200)]


class NewJoinToken(Contract):
    """A join token to create."""

    pool: Annotated[str, Field(min_length=1, max_length=80)] | None = None
    expires: datetime | None = None


class JoinTokenOut(Schema):
    """A created join token."""

    token: str = Field(
        description="for `python -m workers.agent --join`; single-use, shown only here"
    )
    redis_url: str | None = Field(
        default=None,
        description="for `--redis`, with a user of the broker that can only join; null without "
        "one (ORRERY_REDIS_ACL=0)",
    )


@router.get(
    "/nodes",
    response=list[NodeOut],
    auth=require_scope("read"),
    summary="List nodes",
)
@paginated(
    name="nodes",
    serialize_page=lambda rows: [
        node | {"suspect": None} for node in selectors.serialize_nodes(rows)
    ],
    as_json=True,
)
def nodes(
    request: HttpRequest,
    state: Annotated[str | None, Query(alias="health")] = None,
    pool: str | None = None,
) -> Any:
    """Nodes with their devices, health and newest readings."""
    rows = selectors.nodes_visible_to(user=user(request), devices=False).order_by("id")
    if state:
        rows = rows.filter(health=state)
    if pool:
        rows = rows.filter(pool__name=pool)
    return rows


@router.get("/nodes/{id}", response=NodeOut, auth=require_scope("read"), summary="Get a node")
def node(request: HttpRequest, id: str) -> Any:
    """One node, by id or name."""
    node = get_node(request, id)
    suspect = suspect_links.suspicions().get(node.name)
    return selectors.serialize_node(node) | {"suspect": suspect.to_dict() if suspect else None}


@router.post(
    "/nodes/{id}/drain", response=NodeOut, auth=require_scope("fleet"), summary="Drain a node"
)
def drain(request: HttpRequest, id: str, body: Drain | None = None) -> Any:
    """Starts nothing new on the node. Attempts that run there continue."""
    reason = body.reason if body else ""
    drained = services.node_drain(node=get_node(request, id), by=user(request), reason=reason)
    return selectors.serialize_node(drained)


@router.post(
    "/nodes/{id}/undrain", response=NodeOut, auth=require_scope("fleet"), summary="Undrain a node"
)
def undrain(request: HttpRequest, id: str) -> Any:
    """Lets the node accept work again."""
    return selectors.serialize_node(
        services.node_undrain(node=get_node(request, id), by=user(request))
    )


@router.post(
    "/nodes/{id}/confirm-lost",
    response=NodeOut,
    auth=require_scope("fleet"),
    summary="Confirm the loss of a node",
)
def confirm_lost(request: HttpRequest, id: str) -> Any:
    """Ends the attempts of an overdue node, so their runs start elsewhere.

    Needed only if more nodes are overdue at once than `ORRERY_LOST_SHARE` allows.
    """
    return selectors.serialize_node(
        node_health.node_confirm_lost(node=get_node(request, id), by=user(request))
    )


@router.post(
    "/nodes/{id}/cordon", response=NodeOut, auth=require_scope("fleet"), summary="Cordon a node"
)
def cordon(request: HttpRequest, id: str, body: NewCordon | None = None) -> Any:
    """Starts nothing new on the node or one of its devices. Attempts that run there continue.

    The control plane cordons nodes itself after `ORRERY_CORDON_FAILURES` failures in a row.
    """
    wanted = body or NewCordon()
    cordoning.node_cordon(
        node=get_node(request, id), by=user(request), device=wanted.device, reason=wanted.reason
    )
    return selectors.serialize_node(get_node(request, id))


@router.post(
    "/nodes/{id}/uncordon",
    response=NodeOut,
    auth=require_scope("fleet"),
    summary="Lift a cordon",
)
def uncordon(request: HttpRequest, id: str, body: Uncordon | None = None) -> Any:
    """Lets the node, or one of its devices, get work again."""
    device = body.device if body else None
    cordoning.node_uncordon(node=get_node(request, id), by=user(request), device=device)
    return selectors.serialize_node(get_node(request, id))


@router.put(
    "/nodes/{id}/topology",
    response=NodeOut,
    auth=require_scope("fleet"),
    summary="Set a node's place in the network",
)
def node_topology(request: HttpRequest, id: str, body: Topology) -> dict[str, Any]:
    """The path in the tree of switches, such as `row-1/rack-3`. Gangs get nodes that are close."""
    row = services.node_topology_set(node=get_node(request, id), by=user(request), path=body.path)
    return selectors.serialize_node(row)


@router.get(
    "/nodes/{id}/cordons",
    response=list[CordonOut],
    auth=require_scope("read"),
    summary="List a node's cordons",
)
@paginated(name="cordons", newest_first=True, serialize=cordons.serialize_cordon)
def node_cordons(request: HttpRequest, id: str) -> Any:
    """Cordons of the node and its devices, lifted ones too, newest first."""
    return cordons.cordons_of(node=get_node(request, id))


@router.get(
    "/nodes/{id}/probes",
    response=list[NodeProbeOut],
    auth=require_scope("read"),
    summary="List a node's probes",
)
@paginated(name="probes", newest_first=True, serialize=node_probes.serialize)
def probes(request: HttpRequest, id: str) -> Any:
    """What probes of the idle node measured for the planner: the newest of each day."""
    node = get_node(request, id)
    node_probes.overdue_fail()
    return node_probes.probes_of(node=node)


@router.post(
    "/nodes/{id}/probe",
    response={202: NodeProbeOut},
    auth=require_scope("fleet"),
    summary="Probe a node",
)
def probe(request: HttpRequest, id: str, body: NewProbe | None = None) -> Any:
    """Measures the idle node's devices for predictions, for a minute by default.

    A busy node is refused (409). A run that starts meanwhile ends the probe.
    """
    wanted = body or NewProbe()
    row = scheduling.node_probe(
        node=get_node(request, id), by=user(request), seconds=wanted.seconds
    )
    return Status(202, node_probes.serialize(row))


@router.get(
    "/nodes/{id}/preflight-rates",
    response=list[ProbeOut],
    auth=require_scope("read"),
    summary="List the rates of a node's preflight probes",
)
@paginated(name="preflight rates", newest_first=True)
def preflight_rates(request: HttpRequest, id: str) -> Any:
    """Rates that preflight probes measured on the node before gangs, newest first."""
    return probe_history.probes_of(node=get_node(request, id))


@router.delete(
    "/nodes/{id}", response={204: None}, auth=require_scope("fleet"), summary="Remove a node"
)
def remove(request: HttpRequest, id: str) -> HttpResponse:
    """Removes a node without active attempts; its secret is void. To return, it joins again."""
    scheduling.node_remove(node=get_node(request, id), by=user(request))
    return HttpResponse(status=204)


@router.get(
    "/devices", response=list[DeviceOut], auth=require_scope("read"), summary="List devices"
)
@paginated(name="devices", serialize=selectors.serialize_device)
def devices(request: HttpRequest, node: str | None = None) -> Any:
    """Accelerators and CPU slots of all nodes, or of one node by id or name."""
    rows = selectors.devices_visible_to(user=user(request)).order_by("id")
    if node:
        rows = rows.filter(node=get_node(request, node))
    return rows


@router.get("/pools", response=list[PoolOut], auth=require_scope("read"), summary="List pools")
@paginated(name="pools")
def pools(request: HttpRequest) -> Any:
    """Pools: named shares of the fleet with quota and priority."""
    return selectors.pools().order_by("id")


@router.post(
    "/join-tokens",
    response={201: JoinTokenOut},
    auth=require_scope("fleet"),
    summary="Create a join token",
)
@creates(JoinTokenOut, secret=True)
def join_token(request: HttpRequest, body: NewJoinToken | None = None) -> dict[str, Any]:
    """Creates a single-use token with which one node joins the pool, within a day by default."""
    options = body or NewJoinToken()
    text = services.join_token_create(
        by=user(request), pool=options.pool, expires=aware(options.expires)
    )
    return {"token": text, "redis_url": broker_users.limited_join_url()}
