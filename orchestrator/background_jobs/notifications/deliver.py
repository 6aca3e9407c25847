"""Sends one delivery: signs it, records the result, and delays the next try after a failure."""

from __future__ import annotations

import hashlib
import hmac
import json
import smtplib
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from orchestrator.background_jobs.models import Delivery
from orchestrator.background_jobs.notifications import webhook
from orchestrator.background_jobs.notifications.subscriptions import PURPOSE
from orchestrator.common import clock, conditional, secret_text

MOST_TRIES: Final = 8
FIRST_DELAY_S: Final = 10.0  # times 4 per try, at most 6 hours
CLAIM: Final = timedelta(seconds=60)  # longer than one try takes
AT_ONCE: Final = 50


def due(*, now: datetime) -> list[int]:
    """Claim deliveries whose try is due; returns their ids."""
    waiting = Delivery.objects.filter(state=Delivery.State.WAITING, next_try__lte=now)
    return [
        row.pk
        for row in waiting.order_by("next_try")[:AT_ONCE]
        if conditional.update(
            waiting.filter(pk=row.pk, next_try=row.next_try), next_try=now + CLAIM
        )
    ]


def deliver(id: int) -> Delivery | None:
    """Try one delivery and record the result; None if it is done. Receivers drop repeated ids."""
    rows = Delivery.objects.filter(pk=id, state=Delivery.State.WAITING)
    row = rows.select_related("subscription").first()
    if row is None:
        return None
    row.tries += 1
    try:
        _send(row)
    except (webhook.TargetBlocked, secret_text.Unreadable) as error:
        row.state, row.error = Delivery.State.FAILED, str(error)[:300]
    except (webhook.PostFailed, OSError, smtplib.SMTPException) as error:
        row.error = str(error)[:300]
        delay = min(FIRST_DELAY_S * 4 ** (row.tries - 1), 6 * 3600)
        row.next_try = clock.now() + timedelta(seconds=delay)
        if row.tries >= MOST_TRIES:
            row.state = Delivery.State.FAILED
    else:
        row.state, row.error, row.sent = Delivery.State.SENT, "", clock.now()
    rows.update(
        state=row.state, error=row.error, tries=row.tries, next_try=row.next_try, sent=row.sent
    )
    return row


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """`t=<Unix seconds>,v1=<hex>`: HMAC-SHA256 of `<t>.<body>`."""
    digest = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"t={timestamp},v1={digest.hexdigest()}"


def _send(row: Delivery) -> None:
    subscription = row.subscription
    target = secret_text.decrypt(subscription.target, purpose=PURPOSE)
    if subscription.channel == "email":
        text = str(row.body["text"])
        subject = " ".join(f"Orrery: {text}".split())[:150]
        connection = get_connection(timeout=webhook.TIMEOUT_S)
        EmailMessage(
            subject, text, settings.DEFAULT_FROM_EMAIL, [target], connection=connection
        ).send()
        return
    headers = {"Content-Type": "application/json", "User-Agent": "orrery"}
    if subscription.channel == "slack":
        escaped = str(row.body["text"])
        for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            escaped = escaped.replace(character, entity)
        webhook.post(target, json.dumps({"text": escaped}).encode(), headers)
        return
    body = json.dumps({"id": str(row.pk), **row.body}).encode()
    secret = secret_text.decrypt(subscription.secret, purpose=PURPOSE)
    headers["Orrery-Signature"] = signature(secret, int(clock.now().timestamp()), body)
    webhook.post(target, body, headers)
