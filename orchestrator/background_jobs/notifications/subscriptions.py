"""Creates, lists and deletes subscriptions, and queues test messages."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from typing import Final

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.db.models import QuerySet

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.background_jobs.models import Delivery, Subscription
from orchestrator.background_jobs.notifications import webhook
from orchestrator.common import clock, secret_text
from orchestrator.common.errors import conflict, invalid, missing_object
from orchestrator.common.units import is_id

EVENTS: Final = (
    "run_finished",
    "run_failed",
    "run_cancelled",
    "run_hang",
    "node_lost",
    "node_cordoned",
    "budget",
    "alert",
    "usage_weekly",
    "usage_monthly",
)
CHANNELS: Final = ("webhook", "slack", "email")
SCOPES: Final = ("own", "team")
PURPOSE: Final = "subscription"
MOST: Final = 20


def subscription_create(
    *, by: User, name: str, channel: str, target: str, events: Iterable[str], scope: str = "own"
) -> tuple[Subscription, str]:
    """Subscribe: `(subscription, signing secret)`; the secret of a webhook is not shown again.

    Raises 403, 409 for too many subscriptions, 422.
    """
    accounts.require_role(by, Role.SUBMITTER, "create subscriptions")
    name, wanted = name.strip(), list(dict.fromkeys(events))
    if not 1 <= len(name) <= 80:
        raise invalid("name", "a subscription's name has 1 to 80 characters")
    for field, value, allowed in (("channel", channel, CHANNELS), ("scope", scope, SCOPES)):
        if value not in allowed:
            raise invalid(field, f"{value!r} is not a {field}", f"Use one of {', '.join(allowed)}.")
    if not wanted or set(wanted) - set(EVENTS):
        raise invalid(
            "events", "choose one or more known events", f"Use one of {', '.join(EVENTS)}."
        )
    if Subscription.objects.filter(owner=by).count() >= MOST:
        raise conflict(f"You have {MOST} subscriptions. Delete one first.")
    host = _email_host(by, target) if channel == "email" else _url_host(target)
    secret = "whsec_" + secrets.token_urlsafe(32) if channel == "webhook" else ""
    with transaction.atomic():
        row = Subscription.objects.create(
            owner=by,
            name=name,
            channel=channel,
            scope=scope,
            events=wanted,
            host=host,
            target=secret_text.encrypt(target, purpose=PURPOSE),
            secret=secret_text.encrypt(secret, purpose=PURPOSE) if secret else "",
            created=clock.now(),
        )
        accounts.audit(
            actor=by,
            action="subscription.create",
            target=f"subscription:{row.pk}",
            data={"name": name, "channel": channel, "host": host},
        )
    return row, secret


def subscription_delete(*, subscription: Subscription, by: User) -> None:
    """Delete it with its deliveries."""
    with transaction.atomic():
        accounts.audit(
            actor=by,
            action="subscription.delete",
            target=f"subscription:{subscription.pk}",
            data={"name": subscription.name},
        )
        subscription.delete()


def test_send(*, subscription: Subscription, by: User) -> Delivery:
    """Queue a test message; 409 while others wait."""
    waiting = subscription.deliveries.filter(event="test", state=Delivery.State.WAITING)
    if waiting.count() >= 3:
        raise conflict("Three test messages wait. See their errors in the delivery log.")
    now = clock.now()
    body = {"event": "test", "text": f"Test message, requested by {by.username}."}
    return Delivery.objects.create(
        subscription=subscription,
        key=f"test:{secrets.token_hex(8)}",
        event="test",
        body=body,
        created=now,
        next_try=now,
    )


def subscriptions_of(*, user: User) -> QuerySet[Subscription]:
    """The user's subscriptions, newest first."""
    return Subscription.objects.filter(owner=user).order_by("-id")


def subscription_get(*, user: User, id: int | str) -> Subscription:
    """A subscription of the user; for administrators of any. Raises 404."""
    if is_id(id):
        rows = Subscription.objects.filter(pk=int(id))
        row = (rows if at_least(user.role, Role.ADMIN) else rows.filter(owner=user)).first()
        if row is not None:
            return row
    raise missing_object("subscription", id)


def deliveries_of(*, user: User) -> QuerySet[Delivery]:
    """Messages of the user's subscriptions, newest first."""
    rows = Delivery.objects.filter(subscription__owner=user)
    return rows.select_related("subscription").order_by("-id")


def secrets_renew(*, dry_run: bool) -> int:
    """Encrypt targets and secrets that are stored under an earlier key again; how many rows."""
    changed = 0
    for row in Subscription.objects.order_by("pk").iterator():
        stored = {name: text for name in ("target", "secret") if (text := getattr(row, name))}
        new = {}
        for name, text in stored.items():
            with contextlib.suppress(secret_text.Unreadable):
                if value := secret_text.renewed(text, purpose=PURPOSE):
                    new[name] = value
        changed += bool(new)
        if new and not dry_run:
            Subscription.objects.filter(pk=row.pk, **{n: stored[n] for n in new}).update(**new)
    return changed


def _url_host(target: str) -> str:
    try:
        return str(webhook.check_url(target).hostname)[:255]
    except webhook.TargetBlocked as error:
        raise invalid("target", str(error), "Use a URL such as https://example.com/hook.") from None


def _email_host(by: User, target: str) -> str:
    try:
        validate_email(target)
    except ValidationError:
        raise invalid("target", "this is not an e-mail address") from None
    if not settings.EMAIL_HOST:
        raise invalid("channel", "no mail server is configured", "Set ORRERY_SMTP_URL.")
    if target != by.email and not at_least(by.role, Role.OPERATOR):
        raise invalid(
            "target",
            "only the address of your account is allowed",
            f"Use {by.email}." if by.email else "Set the address of the account first.",
        )
    return target
