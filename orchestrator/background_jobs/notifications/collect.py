"""Turns new events of runs, and lost nodes, into deliveries: one per subscription and cause."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db.models import Max

from orchestrator.accounts import selectors as accounts
from orchestrator.alerts import selectors as alerts
from orchestrator.alerts.models import Alert
from orchestrator.background_jobs.models import Delivery, Position, Subscription
from orchestrator.background_jobs.usage import budgets, messages
from orchestrator.common import clock
from orchestrator.common.units import iso
from orchestrator.fleet.models import Cordon, Node
from orchestrator.runs.models import Attempt, RunEvent

OVERLAP: Final = timedelta(seconds=60)  # read again, because a transaction may commit late
_ENDS: Final = ("finished", "failed", "cancelled")


class Cause(NamedTuple):
    """Something to report; `owner` None: about the fleet."""

    key: str
    event: str
    time: datetime
    owner: int | None
    body: dict[str, Any]
    alert: Alert | None = None


def collect() -> int:
    """Create the deliveries of what is new; returns how many. May run again at any time."""
    now = clock.now()
    top = RunEvent.objects.aggregate(top=Max("id"))["top"] or 0
    position, _ = Position.objects.get_or_create(
        name="notifications", defaults={"seen": top, "safe": top, "moved": now}
    )
    subscriptions = list(Subscription.objects.filter(owner__is_active=True).select_related("owner"))
    created = 0
    if subscriptions:
        visible = {row.owner_id: accounts.visible_owners(row.owner) for row in subscriptions}
        causes = [*_run_causes(position.safe), *_node_causes(now), *_alert_causes(now)]
        muted = {row.owner_id: alerts.mutes_of(user=row.owner) for row in subscriptions}
        rows = [
            Delivery(
                subscription=row,
                key=cause.key,
                event=cause.event,
                body=cause.body,
                created=now,
                next_try=now,
            )
            for cause in causes
            for row in subscriptions
            if cause.event in row.events
            and cause.time >= row.created
            and _concerns(row, cause, visible[row.owner_id])
            and not (cause.alert and alerts.is_muted(muted[row.owner_id], cause.alert))
        ]
        rows += messages.deliveries(subscriptions, now=now)
        rows += budgets.deliveries(subscriptions, now=now)
        known = set(
            Delivery.objects.filter(key__in={row.key for row in rows}).values_list(
                "subscription_id", "key"
            )
        )
        new = [row for row in rows if (row.subscription_id, row.key) not in known]
        created = len(Delivery.objects.bulk_create(new, ignore_conflicts=True, batch_size=500))
    if now - position.moved >= OVERLAP:
        position.safe, position.seen, position.moved = position.seen, top, now
        position.save()
    return created


def _concerns(row: Subscription, cause: Cause, visible: list[int] | None) -> bool:
    rule = cause.alert.rule if cause.alert is not None else None
    if rule is not None:  # only its owner's, about a run that the owner still sees
        is_visible = visible is None or cause.owner is None or cause.owner in visible
        return rule.owner_id == row.owner_id and is_visible
    if cause.owner is None or cause.owner == row.owner_id:
        return True
    return row.scope == "team" and (visible is None or cause.owner in visible)


def _run_causes(after: int) -> Iterator[Cause]:
    events = RunEvent.objects.filter(
        pk__gt=after, type="state_changed", data__new__in=[*_ENDS, "exited"]
    ).select_related("run")
    for event in events.order_by("pk"):
        run, state = event.run, event.data.get("new")
        if event.data.get("of") == "run" and state in _ENDS:
            kind, text = f"run_{state}", f"Run {run.pk} {run.name}: {state}"
        elif event.attempt is not None and _hung(run.pk, event.attempt):
            kind, text = "run_hang", f"Run {run.pk} {run.name}: attempt {event.attempt} hung"
        else:
            continue
        reason = (run.exit or {}).get("reason") or event.data.get("why") or ""
        body = {
            "event": kind,
            "time": iso(event.time),
            "text": f"{text}. {reason}".strip(),
            "run": {"id": str(run.pk), "name": run.name, "attempt": event.attempt},
        }
        yield Cause(f"event:{event.pk}", kind, event.time, run.owner_id, body)


def _hung(run: int, number: int) -> bool:
    return Attempt.objects.filter(run=run, number=number, exit_class="hang").exists()


def _alert_causes(now: datetime) -> Iterator[Cause]:
    """Alerts that fired or ended within the last hour."""
    rows = Alert.objects.select_related("run", "rule")
    for state in (Alert.State.FIRING, Alert.State.RESOLVED):
        field = "fired" if state == Alert.State.FIRING else "resolved"
        for alert in rows.filter(**{f"{field}__gte": now - timedelta(hours=1)}):
            is_end = state == Alert.State.RESOLVED
            if is_end and alert.rule is not None and alert.rule.kind == "state":
                continue  # a run's end does not end; its alert only leaves the list
            time = getattr(alert, field)
            run = alert.run
            about = f"Run {run.pk} {run.name}" if run is not None else f"Node {alert.node}"
            end = " It has ended." if is_end else ""
            body: dict[str, Any] = {
                "event": "alert",
                "time": iso(time),
                "text": f"{alert.name}. {about}: {alert.message}.{end}",
                "alert": {
                    "id": str(alert.pk),
                    "rule": alert.name,
                    "state": state.value,
                    "value": alert.value,
                },
            }
            if run is not None:
                body["run"] = {"id": str(run.pk), "name": run.name}
            owner = run.owner_id if run is not None else None
            yield Cause(f"alert:{alert.pk}:{state}", "alert", time, owner, body, alert)


def _node_causes(now: datetime) -> Iterator[Cause]:
    body: dict[str, Any]
    for node in Node.objects.filter(lost_at__gte=now - timedelta(hours=1)):
        assert node.lost_at is not None
        body = {
            "event": "node_lost",
            "time": iso(node.lost_at),
            "text": f"Node {node.name} is lost.",
            "node": {"name": node.name},
        }
        key = f"node:{node.pk}:{node.lost_at.timestamp()}"
        yield Cause(key, "node_lost", node.lost_at, None, body)
    cordons = Cordon.objects.filter(created__gte=now - timedelta(hours=1))
    for cordon in cordons.exclude(cause=Cordon.Cause.OPERATOR).select_related("node", "device"):
        name = cordon.node.name
        target = f"Device {cordon.device.index} of {name}" if cordon.device else f"Node {name}"
        text = f"{target} is cordoned. {cordon.reason}".strip()
        about = {"name": name, "device": cordon.device.index if cordon.device else None}
        body = {
            "event": "node_cordoned",
            "time": iso(cordon.created),
            "text": text,
            "node": about,
        }
        yield Cause(f"cordon:{cordon.pk}", "node_cordoned", cordon.created, None, body)
