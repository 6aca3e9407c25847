"""Subscriptions of the caller to messages about runs and nodes, and their delivery log."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import Id, Time
from orchestrator.background_jobs.notifications import subscriptions
from workers.contracts.base import Contract

router = Router(tags=["notifications"])


class NewSubscription(Contract):
    """A subscription to create."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    channel: Annotated[str, Field(description="webhook, slack or email")]
    target: Annotated[str, Field(max_length=2000, description="URL or e-mail address")]
    events: list[str]
    scope: Annotated[str, Field(description="own: your runs; team: all that you see")] = "own"


class SubscriptionOut(Schema):
    """A subscription; of its target only the host."""

    id: Id
    name: str
    channel: str
    scope: str
    events: list[str]
    host: str
    created: Time


class NewSubscriptionOut(SubscriptionOut):
    """A new subscription with its signing secret, empty for other channels than webhook."""

    secret: str


class DeliveryOut(Schema):
    """One message and what became of it."""

    id: Id
    event: str
    state: str
    tries: int
    error: str
    created: Time
    sent: Time | None
    next_try: Time


@router.get("", response=list[SubscriptionOut], auth=require_scope("read"), summary="List")
@paginated(name="notifications", newest_first=True)
def subscription_list(request: HttpRequest) -> Any:
    """Your subscriptions, newest first, without targets and secrets."""
    return subscriptions.subscriptions_of(user=user(request))


@router.post(
    "", response={201: NewSubscriptionOut}, auth=require_scope("runs"), summary="Subscribe"
)
@creates(NewSubscriptionOut, secret=True)
def subscription_create(request: HttpRequest, body: NewSubscription) -> dict[str, Any]:
    """Subscribes. This response is the only one that shows a webhook's signing secret."""
    row, secret = subscriptions.subscription_create(by=user(request), **body.model_dump())
    return SubscriptionOut.from_orm(row).model_dump() | {"secret": secret}


@router.delete("/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Unsubscribe")
def subscription_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the subscription and its delivery log."""
    by = user(request)
    row = subscriptions.subscription_get(user=by, id=id)
    subscriptions.subscription_delete(subscription=row, by=by)
    return HttpResponse(status=204)


@router.post(
    "/{int:id}/test", response={201: DeliveryOut}, auth=require_scope("runs"), summary="Send test"
)
@creates(DeliveryOut)
def subscription_test(request: HttpRequest, id: int) -> dict[str, Any]:
    """Queues a test message; the delivery log shows its result within seconds."""
    by = user(request)
    row = subscriptions.subscription_get(user=by, id=id)
    sent = subscriptions.test_send(subscription=row, by=by)
    return DeliveryOut.from_orm(sent).model_dump()


@router.get(
    "/{int:id}/deliveries",
    response=list[DeliveryOut],
    auth=require_scope("read"),
    summary="List deliveries",
)
@paginated(name="deliveries", newest_first=True)
def delivery_list(request: HttpRequest, id: int) -> Any:
    """Messages of the subscription, newest first, with tries and errors."""
    row = subscriptions.subscription_get(user=user(request), id=id)
    return row.deliveries.order_by("-id")
