"""Nodes, devices, pools, draining, and the tokens by which new nodes join."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import node_of
from orchestrator.api.http.pagination import Page, paged_query, paged_whole
from orchestrator.api.schemas import DeviceOut, NodeOut, PageOf, PoolOut, aware
from orchestrator.fleet import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["fleet"])


class Drain(Contract):
    reason: Annotated[str, Field(max_length=200, description="shown beside the node")] = ""


class NewJoinToken(Contract):
    pool: Annotated[str, Field(min_length=1, max_length=80)] | None = None
    expires: datetime | None = None


class JoinTokenOut(Schema):
    token: str = Field(
        description="for `python -m workers.agent --join`; shown this once, works once"
    )


@router.get(
    "/nodes",
    response=PageOf[NodeOut],
    auth=needs("read"),
    summary="Nodes with devices, health and readings",
)
def nodes(
    request: HttpRequest, page: Page, health: str | None = None, pool: str | None = None
) -> dict[str, Any]:
    rows = selectors.nodes_visible_to(user=user(request)).order_by("id")
    if health:
        rows = rows.filter(health=health)
    if pool:
        rows = rows.filter(pool__name=pool)
    return paged_query(rows, page, "nodes", selectors.node_answer)


@router.get(
    "/nodes/{id}", response=NodeOut, auth=needs("read"), summary="One node, by number or name"
)
def node(request: HttpRequest, id: str) -> Any:
    return selectors.node_answer(node_of(request, id))


@router.post(
    "/nodes/{id}/drain", response=NodeOut, auth=needs("fleet"), summary="Give the node nothing new"
)
def drain(request: HttpRequest, id: str, body: Drain | None = None) -> Any:
    found = node_of(request, id)
    return selectors.node_answer(
        services.node_drain(node=found, by=user(request), reason=body.reason if body else "")
    )


@router.post(
    "/nodes/{id}/undrain", response=NodeOut, auth=needs("fleet"), summary="Let the node work again"
)
def undrain(request: HttpRequest, id: str) -> Any:
    return selectors.node_answer(services.node_undrain(node=node_of(request, id), by=user(request)))


@router.get(
    "/devices", response=PageOf[DeviceOut], auth=needs("read"), summary="Accelerators and CPU slots"
)
def devices(request: HttpRequest, page: Page, node: str | None = None) -> dict[str, Any]:
    rows = selectors.devices_visible_to(user=user(request)).order_by("id")
    if node:
        rows = rows.filter(node=node_of(request, node))
    return paged_query(rows, page, "devices", selectors.device_answer)


@router.get(
    "/pools", response=PageOf[PoolOut], auth=needs("read"), summary="Named shares of the fleet"
)
def pools(request: HttpRequest, page: Page) -> dict[str, Any]:
    return paged_whole(
        selectors.pools().order_by("id"), page, "pools", lambda pool: pool.pk, lambda pool: pool
    )


@router.post(
    "/join-tokens",
    response={201: JoinTokenOut},
    auth=needs("fleet"),
    summary="A token that lets one node join, once",
)
@creates(JoinTokenOut, secret=True)
def join_token(request: HttpRequest, body: NewJoinToken | None = None) -> dict[str, Any]:
    asked = body or NewJoinToken()
    return {
        "token": services.join_token_create(
            by=user(request), pool=asked.pool, expires=aware(asked.expires)
        )
    }
