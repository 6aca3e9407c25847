"""Reads rules, alerts and mutes; checks what a user may see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.alerts.builtin import BUILTINS
from orchestrator.alerts.models import Alert, AlertMute, AlertRule
from orchestrator.common import clock
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id, iso


def rules_of(*, user: User) -> QuerySet[AlertRule]:
    """The user's rules, newest first."""
    return AlertRule.objects.filter(owner=user).order_by("-id")


def rule_get(*, user: User, id: int | str) -> AlertRule:
    """A rule of the user. Raises 404."""
    row = AlertRule.objects.filter(owner=user, pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("alert rule", id)
    return row


def alerts_visible_to(*, user: User, state: str = "") -> QuerySet[Alert]:
    """Alerts of built-in and the user's own rules about what the user sees; newest first.

    `state` is firing or resolved; pending ones are not listed.
    """
    owners = people.visible_owners(user)
    rows = Alert.objects.filter(Q(rule=None) | Q(rule__owner=user))
    if owners is not None:
        rows = rows.filter(Q(run__owner__in=owners) | Q(run=None))
    rows = rows.filter(state=state) if state else rows.exclude(state=Alert.State.PENDING)
    return rows.select_related("run", "acknowledged_by", "rule").order_by("-id")


def alert_get(*, user: User, id: int | str) -> Alert:
    """An alert that the user sees. Raises 404."""
    row = alerts_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("alert", id)
    return row


def mutes_of(*, user: User) -> dict[tuple[str, str], AlertMute]:
    """The user's mutes that have not ended, by source and subject."""
    rows = AlertMute.objects.filter(owner=user)
    rows = rows.filter(Q(until=None) | Q(until__gt=clock.now()))
    return {(row.source, row.subject): row for row in rows}


def is_muted(mutes: Mapping[tuple[str, str], Any], alert: Alert) -> bool:
    """Whether a user's mutes cover an alert."""
    return (alert.source, "") in mutes or (alert.source, alert.subject) in mutes


def sources_of(*, user: User) -> set[str]:
    """What the user can mute: built-in rules and the user's own."""
    own = AlertRule.objects.filter(owner=user).values_list("pk", flat=True)
    return {*BUILTINS, *(f"rule:{pk}" for pk in own)}


def serialize_rule(rule: AlertRule) -> dict[str, Any]:
    """The REST representation of a rule."""
    return {
        "id": str(rule.pk),
        "name": rule.name,
        "kind": rule.kind,
        "metric": rule.metric,
        "operator": rule.operator,
        "threshold": rule.threshold,
        "state": rule.state,
        "for_s": rule.for_s,
        "query": rule.query,
        "scope": rule.scope,
        "enabled": rule.enabled,
        "problem": rule.problem,
        "created": iso(rule.created),
    }


def serialize_alert(alert: Alert) -> dict[str, Any]:
    """The REST representation of an alert."""
    by = alert.acknowledged_by
    return {
        "id": str(alert.pk),
        "source": alert.source,
        "name": alert.name,
        "state": alert.state,
        "run": str(alert.run_id) if alert.run_id else None,
        "node": alert.node or None,
        "subject": alert.subject,
        "message": alert.message,
        "value": alert.value,
        "fired": iso(alert.fired),
        "resolved": iso(alert.resolved),
        "acknowledged": iso(alert.acknowledged),
        "acknowledged_by": by.username if by is not None else None,
    }
