"""Nodes, devices, pools, draining, and join tokens for new nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import get_node
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas import DeviceOut, NodeOut, PoolOut, aware
from orchestrator.fleet import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


class Drain(Contract):
    """Why a node is drained."""

    reason: Annotated[str, Field(max_length=200, description="shown on the node")] = ""


class NewJoinToken(Contract):
    """A join token to create."""

    pool: Annotated[str, Field(min_length=1, max_length=80)] | None = None
    expires: datetime | None = None


class JoinTokenOut(Schema):
    """A created join token."""

    token: str = Field(
        description="for `python -m workers.agent --join`; single-use, shown only here"
    )


@router.get(
    "/nodes",
    response=list[NodeOut],
    auth=require_scope("read"),
    summary="List nodes",
)
@paginated(name="nodes", serialize=selectors.serialize_node)
def nodes(request: HttpRequest, health: str | None = None, pool: str | None = None) -> Any:
    """Nodes with their devices, health and newest readings."""
    rows = selectors.nodes_visible_to(user=user(request)).order_by("id")
    if health:
        rows = rows.filter(health=health)
    if pool:
        rows = rows.filter(pool__name=pool)
    return rows


@router.get("/nodes/{id}", response=NodeOut, auth=require_scope("read"), summary="Get a node")
def node(request: HttpRequest, id: str) -> Any:
    """One node, by id or name."""
    return selectors.serialize_node(get_node(request, id))


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
    return {"token": text}
