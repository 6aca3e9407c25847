"""Evaluates rules, and writes rules, acknowledgements and mutes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.alerts.builtin import BUILTINS
from orchestrator.alerts.conditions import KINDS, Condition, Facts, Hit, hit_of
from orchestrator.alerts.models import Alert, AlertMute, AlertRule
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, conflict, invalid
from orchestrator.fleet.models import Node
from orchestrator.run_table import selectors as run_table
from orchestrator.runs.models import Attempt, Run
from orchestrator.telemetry import selectors as telemetry

MOST: Final = 50  # rules of a person
MOST_MUTES: Final = 200  # of a person
PAUSE: Final = timedelta(minutes=10)  # after an alert's end until one of the same opens
_RECENT: Final = timedelta(hours=1)  # ended runs that rules about states see
_STATES: Final = ("finished", "failed", "cancelled")
_NUMBERED: Final = ("threshold", "no_progress", "slow", "idle", "cost")
log = logging.getLogger(__name__)
Hits = dict[str, tuple[Hit, Run | None, str]]  # subject → hit, run, node


def rule_create(
    *,
    by: User,
    name: str,
    kind: str,
    metric: str = "",
    operator: str = ">",
    threshold: float | None = None,
    state: str = "",
    for_s: float = 0.0,
    query: str = "",
    scope: str = "own",
) -> AlertRule:
    """Create a rule. Raises 422 that names the field."""
    accounts.require_role(by, Role.SUBMITTER, "create alert rules")
    name, metric = name.strip(), metric.strip()
    if not 1 <= len(name) <= 80:
        raise invalid("name", f"the name has {len(name)} characters", "Use 1 to 80 characters.")
    for field, value, allowed in (
        ("kind", kind, KINDS),
        ("scope", scope, ("own", "team")),
        ("operator", operator, ("<", ">")),
    ):
        if value not in allowed:
            raise invalid(field, f"{value!r} is not a {field}", f"Use one of {', '.join(allowed)}.")
    if kind == "threshold" and not metric:
        raise invalid(
            "metric", "a threshold needs a metric", "Use the name of a metric, such as val_loss."
        )
    if len(metric) > 120:
        raise invalid("metric", f"the name has {len(metric)} characters", "Use at most 120.")
    if kind in _NUMBERED and (threshold is None or not math.isfinite(threshold)):
        raise invalid("threshold", f"{kind} needs a number", "Use a number such as 0.5.")
    if kind == "state" and state not in _STATES:
        raise invalid(
            "state", f"{state!r} is not an end of a run", f"Use one of {', '.join(_STATES)}."
        )
    if not 0 <= for_s <= 604_800:
        raise invalid("for_s", f"{for_s:g} seconds are not possible", "Use 0 to 604800.")
    run_table.matching(user=by, query=query)  # raises 422 with a caret
    if AlertRule.objects.filter(owner=by).count() >= MOST:
        raise conflict(f"You have {MOST} rules. Delete one first.")
    rule = AlertRule.objects.create(
        owner=by,
        name=name,
        kind=kind,
        metric=metric,
        operator=operator,
        threshold=threshold if kind in _NUMBERED else None,
        state=state if kind == "state" else "",
        for_s=for_s,
        query=query.strip(),
        scope=scope,
        created=clock.now(),
    )
    data = {"name": name, "kind": kind}
    accounts.audit(actor=by, action="alert_rule.create", target=f"alert_rule:{rule.pk}", data=data)
    return rule


def rule_enable(*, rule: AlertRule, enabled: bool, by: User) -> AlertRule:
    """Turn a rule on or off; off resolves its open alerts."""
    with transaction.atomic():
        rule.enabled = enabled
        rule.save(update_fields=["enabled"])
        if not enabled:
            _settle(f"rule:{rule.pk}", rule.name, rule, {}, 0.0, clock.now())
        data = {"enabled": enabled}
        target = f"alert_rule:{rule.pk}"
        accounts.audit(actor=by, action="alert_rule.enable", target=target, data=data)
    return rule


def rule_delete(*, rule: AlertRule, by: User) -> None:
    """Delete a rule with its alerts."""
    with transaction.atomic():
        data = {"name": rule.name}
        target = f"alert_rule:{rule.pk}"
        accounts.audit(actor=by, action="alert_rule.delete", target=target, data=data)
        AlertMute.objects.filter(source=f"rule:{rule.pk}").delete()
        rule.delete()


def alert_acknowledge(*, alert: Alert, by: User) -> Alert:
    """Record that a user takes care of the alert; the first one counts."""
    accounts.require_role(by, Role.SUBMITTER, "acknowledge alerts")
    rows = Alert.objects.filter(pk=alert.pk, acknowledged=None)
    conditional.update(rows, acknowledged=clock.now(), acknowledged_by=by)
    alert.refresh_from_db()
    return alert


def mute(*, by: User, source: str, subject: str = "", hours: float | None = None) -> AlertMute:
    """Send the user no messages of a rule, about one subject or all; None: without an end.

    Raises 409 for too many mutes, 422 for `hours` outside 0 to 8760.
    """
    if hours is not None and not 0 < hours <= 8760:
        raise invalid(
            "hours", f"{hours:g} hours are not possible", "Use at most 8760, or omit the field."
        )
    until = None if hours is None else clock.now() + timedelta(hours=hours)
    own = AlertMute.objects.filter(owner=by)
    own.filter(until__lte=clock.now()).delete()
    if own.exclude(source=source, subject=subject).count() >= MOST_MUTES:
        raise conflict(f"You have {MOST_MUTES} mutes. End one first.")
    row, _ = AlertMute.objects.update_or_create(
        owner=by, source=source, subject=subject, defaults={"until": until}
    )
    return row


def unmute(*, by: User, source: str, subject: str = "") -> None:
    """End a mute."""
    AlertMute.objects.filter(owner=by, source=source, subject=subject).delete()


def evaluate() -> dict[str, int]:
    """Evaluate all rules; `{fired, resolved}`. May run again at any time."""
    now, counts = clock.now(), {"fired": 0, "resolved": 0}
    watched = Q(state="running") | Q(ended__gte=now - _RECENT)
    runs = list(Run.objects.filter(watched))
    values = telemetry.latest_of(runs=Run.objects.filter(state="running"))
    spans: dict[int, list[_Span]] = {run.pk: [] for run in runs}
    attempts = Attempt.objects.filter(
        run__in=Run.objects.filter(watched).order_by().values("pk"), started__isnull=False
    )
    for run_id, started, ended, placement in attempts.values_list(
        "run_id", "started", "ended", "placement"
    ):
        assert started is not None  # the query's filter
        if run_id in spans:  # not a run that started meanwhile
            held = sum(len(share["devices"]) for share in placement)
            spans[run_id].append(_Span(started, ended, held))
    facts = {run.pk: _facts(run, values.get(run.pk, {}), spans[run.pk], now) for run in runs}
    for builtin in BUILTINS.values():
        if builtin.condition is None:
            hits = _lost_nodes()
        else:
            hits = _hits_of(builtin.condition, runs, facts)
        _count(counts, _settle(builtin.name, builtin.title, None, hits, builtin.for_s, now))
    for rule in AlertRule.objects.filter(enabled=True).select_related("owner"):
        try:
            with transaction.atomic():
                hits = _hits_of(_condition(rule), _concerned(rule, runs, watched), facts)
                _count(counts, _settle(f"rule:{rule.pk}", rule.name, rule, hits, rule.for_s, now))
        except Exception:  # the other rules are still evaluated
            log.exception("alert rule %s could not be evaluated", rule.pk)
    # a rule may have been turned off while an earlier evaluation opened its alerts
    left = Alert.objects.filter(rule=OuterRef("pk"), resolved=None)
    for rule in AlertRule.objects.filter(Exists(left), enabled=False):
        _count(counts, _settle(f"rule:{rule.pk}", rule.name, rule, {}, 0.0, now))
    return counts


def _count(counts: dict[str, int], changes: tuple[int, int]) -> None:
    counts["fired"] += changes[0]
    counts["resolved"] += changes[1]


class _Span(NamedTuple):
    """An attempt from its start to its end, with its devices."""

    start: datetime
    end: datetime | None
    devices: int


def _facts(
    run: Run,
    latest: Mapping[str, float],
    spans: Sequence[_Span],
    now: datetime,
) -> Facts:
    """`spans` are those of the attempts. The time between attempts is neither silence nor
    cost: a resumed run is silent since its start at most.
    """
    seen = max(
        (time for time in (run.last_progress, *(span.start for span in spans)) if time),
        default=None,
    )
    hours = sum(
        (span.devices or run.devices) * ((span.end or now) - span.start).total_seconds() / 3600
        for span in spans
    )
    return Facts(
        state=run.state,
        kind=run.kind,
        latest=latest,
        prediction=run.prediction or {},
        silent_s=(now - seen).total_seconds() if seen is not None else None,
        device_hours=hours,
        reason=str((run.exit or {}).get("reason") or ""),
    )


def _condition(rule: AlertRule) -> Condition:
    return Condition(
        rule.kind, rule.metric, rule.operator or ">", rule.threshold or 0.0, rule.state
    )


def _concerned(rule: AlertRule, runs: Iterable[Run], watched: Q) -> list[Run]:
    """The runs that a rule is about: its owner's or all visible ones, by its query."""
    by_id = {run.pk: run for run in runs}
    filters: dict[str, Any] = {"owner": rule.owner.username} if rule.scope == "own" else {}
    problem, ids = "", list[int]()
    try:
        rows = run_table.table_runs(user=rule.owner, query=rule.query, **filters)
        ids = list(rows.filter(watched).values_list("pk", flat=True))
    except Refusal as refusal:  # a metric of the query may be gone
        problem = refusal.detail[:300]
    if problem != rule.problem:
        AlertRule.objects.filter(pk=rule.pk).update(problem=problem)
    return [by_id[id] for id in ids if id in by_id]


def _hits_of(condition: Condition, runs: Iterable[Run], facts: Mapping[int, Facts]) -> Hits:
    hits = ((run, hit_of(condition, facts[run.pk])) for run in runs)
    return {f"run:{run.pk}": (hit, run, "") for run, hit in hits if hit is not None}


def _lost_nodes() -> Hits:
    rows = Node.objects.filter(lost_at__isnull=False)
    return {
        f"node:{row.name}"[:100]: (Hit("The node does not answer"), None, row.name) for row in rows
    }


def _settle(
    source: str, name: str, rule: AlertRule | None, hits: Hits, for_s: float, now: datetime
) -> tuple[int, int]:
    """Open, fire and resolve alerts of a rule; `(fired, resolved)`."""
    own = Alert.objects.filter(source=source)
    open_alerts = {alert.subject: alert for alert in own.filter(resolved=None)}
    pauses = set[str]()
    if hits.keys() - open_alerts.keys():
        recent = own.filter(resolved__gt=now - PAUSE)
        pauses = set(recent.values_list("subject", flat=True))
    fired = resolved = 0
    for subject, (hit, run, node) in hits.items():
        alert = open_alerts.pop(subject, None)
        if alert is None and subject in pauses:
            continue
        if alert is None:
            is_due = for_s <= 0
            fired += _open(
                source=source,
                rule=rule,
                name=name,
                run=run,
                node=node,
                subject=subject,
                state=Alert.State.FIRING if is_due else Alert.State.PENDING,
                message=hit.message,
                value=hit.value,
                begun=now,
                fired=now if is_due else None,
            )
        elif alert.state == Alert.State.PENDING and now - alert.begun >= timedelta(seconds=for_s):
            rows = Alert.objects.filter(pk=alert.pk, state=Alert.State.PENDING)
            fired += conditional.update(
                rows, state=Alert.State.FIRING, fired=now, message=hit.message, value=hit.value
            )
        elif alert.message != hit.message:
            Alert.objects.filter(pk=alert.pk).update(message=hit.message, value=hit.value)
    for alert in open_alerts.values():
        if alert.state == Alert.State.PENDING:
            Alert.objects.filter(pk=alert.pk, state=Alert.State.PENDING).delete()
            continue
        rows = Alert.objects.filter(pk=alert.pk, state=Alert.State.FIRING)
        resolved += conditional.update(rows, state=Alert.State.RESOLVED, resolved=now)
    return fired, resolved


def _open(**values: Any) -> int:
    """Whether a new alert fires; another evaluation may have opened it meanwhile."""
    try:
        with transaction.atomic():
            alert = Alert.objects.create(**values)
    except IntegrityError:
        return 0
    return int(alert.state == Alert.State.FIRING)
