"""Retention policies: what is old, deleted or thinned in short batches, or only counted.

A dry run counts with the same query that a real run deletes by. Thinning empties a field: of
a chunk the data but not its summary, so charts show every spike and exports lose detail; of a
program the files but not their fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.sessions.models import Session
from django.db.models import CharField, Exists, F, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Cast, Concat

from orchestrator.accounts.idempotency import RETENTION as IDEMPOTENCY_RETENTION
from orchestrator.accounts.models import ApiToken, AuditEntry, IdempotencyKey
from orchestrator.alerts.models import Alert, AlertMute
from orchestrator.background_jobs.models import Delivery, JobRun, UsageDay
from orchestrator.common.models import Frame, Topic
from orchestrator.dead_letters.models import DeadLetter, DeadLetterState
from orchestrator.device_history.models import AttemptHour, NodeReadings, PoolReadings
from orchestrator.device_history.series import MINUTE_S, QUARTER_S, ROW_S
from orchestrator.fleet.models import Cordon, JoinToken, NodeProbe, ProbeResult
from orchestrator.reports.models import ShareLink
from orchestrator.runs.models import Deletion, ProgramSnapshot, Run, RunCode, RunEvent
from orchestrator.telemetry.models import Chunk, LogChunk

BATCH: Final = 1000  # rows per transaction, so that other writers do not wait long

Rows = QuerySet[Any]


@dataclass(frozen=True, slots=True)
class Policy:
    """Rows older than a setting. `rows(now)` is None if the setting retains them forever."""

    name: str
    setting: str  # field of Env; empty: fixed
    rows: Callable[[datetime], Rows | None]
    thin: str = ""  # the field to empty instead of deleting the row


def retain(
    *, policies: tuple[Policy, ...], now: datetime, dry_run: bool, renew: Callable[[], None]
) -> dict[str, int]:
    """Apply the policies; returns the number of rows by policy. `renew` is called per batch."""
    counts = {}
    for policy in policies:
        rows = policy.rows(now)
        if rows is None:
            continue
        counts[policy.name] = rows.count() if dry_run else _apply(policy, rows, renew)
    return counts


def _apply(policy: Policy, rows: Rows, renew: Callable[[], None]) -> int:
    """Delete or thin in the order of the key, so that no batch reads the rows before it again."""
    changed, last = 0, None
    while True:
        page = rows if last is None else rows.filter(pk__gt=last)
        keys = list(page.order_by("pk").values_list("pk", flat=True)[:BATCH])
        if not keys:
            return changed
        last = keys[-1]
        if policy.thin:
            # with the condition: another transaction may need a row meanwhile
            changed += rows.filter(pk__in=keys).update(**{policy.thin: b""})
        else:
            batch = rows.model._default_manager.filter(pk__in=keys)
            batch.delete()  # its count would include dependent rows
            changed += len(keys)
        renew()


def _before(now: datetime, days: float) -> datetime | None:
    return now - timedelta(days=days) if days else None


def _frames(now: datetime) -> Rows:
    return Frame.objects.filter(created__lt=now - timedelta(seconds=settings.ENV.retain_frames_s))


def _topics(now: datetime) -> Rows | None:
    """Topics of runs that ended long ago, unless a frame is new."""
    before = _before(now, settings.ENV.retain_topics_days)
    if before is None:
        return None
    names = Run.objects.filter(ended__lt=before).values(
        topic=Concat(Value("run:"), Cast(F("id"), CharField()))
    )
    recent = Frame.objects.filter(topic=OuterRef("pk"), created__gte=before)
    return Topic.objects.filter(~Exists(recent), name__in=names)


def _events(now: datetime) -> Rows | None:
    """Events of ended runs; the newest of each run stays, because it numbers the next one."""
    before = _before(now, settings.ENV.retain_events_days)
    if before is None:
        return None
    newer = RunEvent.objects.filter(run=OuterRef("run"), seq__gt=OuterRef("seq"))
    return RunEvent.objects.filter(Exists(newer), time__lt=before, run__ended__lt=before)


def _logs(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_logs_days)
    return (
        None if before is None else LogChunk.objects.filter(time__lt=before, run__ended__lt=before)
    )


def _series(now: datetime) -> Rows | None:
    """Full chunks of ended runs; an open chunk is still extended from its data."""
    before = _before(now, settings.ENV.retain_series_days)
    return (
        None
        if before is None
        else Chunk.objects.filter(
            level=0, last_time__lt=before.timestamp(), series__run__ended__lt=before, series__open=0
        ).exclude(data=b"")
    )


def _audit(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_audit_days)
    return None if before is None else AuditEntry.objects.filter(time__lt=before)


def _sessions(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_sessions_days)
    return None if before is None else Session.objects.filter(expire_date__lt=before)


def _job_runs(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_jobs_days)
    return (
        None
        if before is None
        else JobRun.objects.filter(created__lt=before, state__in=("ok", "failed"))
    )


def _deliveries(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_jobs_days)
    if before is None:
        return None
    return Delivery.objects.filter(created__lt=before, state__in=("sent", "failed"))


def _alerts(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_jobs_days)
    return None if before is None else Alert.objects.filter(resolved__lt=before)


def _mutes(now: datetime) -> Rows:
    return AlertMute.objects.filter(until__lt=now)


def _deletions(now: datetime) -> Rows | None:
    """Confirmed deletions of checkpoints; those of folders prevent a second order."""
    before = _before(now, settings.ENV.retain_jobs_days)
    return None if before is None else Deletion.objects.filter(done__lt=before, kind="checkpoint")


def _dead_letters(now: datetime) -> Rows | None:
    """Messages that were retried or dropped; open ones wait for an operator."""
    before = _before(now, settings.ENV.retain_jobs_days)
    if before is None:
        return None
    return DeadLetter.objects.filter(updated__lt=before).exclude(state=DeadLetterState.OPEN)


def _usage(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_usage_days)
    return None if before is None else UsageDay.objects.filter(day__lt=before.date(), final=True)


def _minutes(rows: type[NodeReadings] | type[PoolReadings]) -> Callable[[datetime], Rows | None]:
    return _readings(rows, MINUTE_S, "retain_device_minutes_days")


def _quarters(rows: type[NodeReadings] | type[PoolReadings]) -> Callable[[datetime], Rows | None]:
    return _readings(rows, QUARTER_S, "retain_device_history_days")


def _readings(
    rows: type[NodeReadings] | type[PoolReadings], step_s: int, setting: str
) -> Callable[[datetime], Rows | None]:
    """Rows whose newest point is old."""

    def old(now: datetime) -> Rows | None:
        before = _before(now, getattr(settings.ENV, setting))
        if before is None:
            return None
        start = before.timestamp() - ROW_S[step_s]
        return rows.objects.filter(step_s=step_s, start__lt=start)

    return old


def _attempt_hours(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_device_history_days)
    return None if before is None else AttemptHour.objects.filter(hour__lt=before.timestamp())


def _programs(now: datetime) -> Rows | None:
    """Files of stored programs whose runs have all ended long ago."""
    before = _before(now, settings.ENV.retain_programs_days)
    if before is None:
        return None
    needed = RunCode.objects.filter(snapshot=OuterRef("pk"))
    needed = needed.filter(Q(run__ended=None) | Q(run__ended__gte=before))
    old = ProgramSnapshot.objects.filter(~Exists(needed), created__lt=before)
    return old.exclude(packed=b"")


def _diffs(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_programs_days)
    return (
        None if before is None else RunCode.objects.filter(run__ended__lt=before).exclude(diff=b"")
    )


def _probes(now: datetime) -> Rows | None:
    """Results of preflight probes; they follow the setting of events."""
    before = _before(now, settings.ENV.retain_events_days)
    return None if before is None else ProbeResult.objects.filter(time__lt=before)


def _node_probes(now: datetime) -> Rows | None:
    """Probes of idle nodes, except the newest of each node, from which the planner predicts.

    Those that delay the next probe of an idle node stay too: the newest may be a short one.
    """
    before = _before(now, settings.ENV.retain_events_days)
    if before is None:
        return None
    before = min(before, now - timedelta(days=settings.ENV.idle_probe_days))
    newer = NodeProbe.objects.filter(node=OuterRef("node"), day__gt=OuterRef("day"))
    return NodeProbe.objects.filter(
        Exists(newer.exclude(time=None)), day__lt=before.date()
    ).exclude(state=NodeProbe.State.REQUESTED)


def _cordons(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_events_days)
    return None if before is None else Cordon.objects.filter(lifted__lt=before)


def _tokens(now: datetime) -> Rows | None:
    """API tokens that have been invalid for as long as audit entries are retained."""
    before = _before(now, settings.ENV.retain_audit_days)
    return None if before is None else ApiToken.objects.filter(_invalid_before(before))


def _share_links(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_audit_days)
    return None if before is None else ShareLink.objects.filter(_invalid_before(before))


def _invalid_before(time: datetime) -> Q:
    return Q(revoked__lt=time) | Q(expires__lt=time)


def _join_tokens(now: datetime) -> Rows | None:
    """Join tokens that expired unused; secrets of nodes derive from the used ones."""
    before = _before(now, settings.ENV.retain_jobs_days)
    return None if before is None else JoinToken.objects.filter(used=None, expires__lt=before)


def _admin_log(now: datetime) -> Rows | None:
    before = _before(now, settings.ENV.retain_audit_days)
    return None if before is None else LogEntry.objects.filter(action_time__lt=before)


def _idempotency(now: datetime) -> Rows:
    return IdempotencyKey.objects.filter(created__lt=now - IDEMPOTENCY_RETENTION)


FREQUENT: Final = (
    Policy("frames", "retain_frames_s", _frames),
    Policy("idempotency_keys", "", _idempotency),
    Policy("alert_mutes", "", _mutes),
)
POLICIES: Final = (
    Policy("events", "retain_events_days", _events),
    Policy("logs", "retain_logs_days", _logs),
    Policy("series", "retain_series_days", _series, thin="data"),
    Policy("topics", "retain_topics_days", _topics),
    Policy("audit", "retain_audit_days", _audit),
    Policy("sessions", "retain_sessions_days", _sessions),
    Policy("job_runs", "retain_jobs_days", _job_runs),
    Policy("alerts", "retain_jobs_days", _alerts),
    Policy("deletions", "retain_jobs_days", _deletions),
    Policy("probes", "retain_events_days", _probes),
    Policy("node_probes", "retain_events_days", _node_probes),
    Policy("cordons", "retain_events_days", _cordons),
    Policy("api_tokens", "retain_audit_days", _tokens),
    Policy("share_links", "retain_audit_days", _share_links),
    Policy("join_tokens", "retain_jobs_days", _join_tokens),
    Policy("admin_log", "retain_audit_days", _admin_log),
    Policy("deliveries", "retain_jobs_days", _deliveries),
    Policy("dead_letters", "retain_jobs_days", _dead_letters),
    Policy("usage", "retain_usage_days", _usage),
    Policy("node_minutes", "retain_device_minutes_days", _minutes(NodeReadings)),
    Policy("pool_minutes", "retain_device_minutes_days", _minutes(PoolReadings)),
    Policy("node_quarters", "retain_device_history_days", _quarters(NodeReadings)),
    Policy("pool_quarters", "retain_device_history_days", _quarters(PoolReadings)),
    Policy("attempt_hours", "retain_device_history_days", _attempt_hours),
    Policy("programs", "retain_programs_days", _programs, thin="packed"),
    Policy("program_diffs", "retain_programs_days", _diffs, thin="diff"),
)
