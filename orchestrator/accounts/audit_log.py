"""Searches the audit log and writes it as CSV. Does not add entries (`services.audit`)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from django.db.models import Q, QuerySet

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.accounts.selectors import audit_entries
from orchestrator.common.errors import invalid
from orchestrator.common.units import csv_text, day_of

MOST_ROWS: Final = 100_000  # of a CSV file
COLUMNS: Final = ("time", "user", "action", "target", "data", "ip")


@dataclass(frozen=True)
class Search:
    """What entries match; empty fields match all. Days are UTC and included."""

    action: str = ""  # node.drain, or with a dot at the end all of a kind: run.
    user: str = ""
    target: str = ""  # run:12
    text: str = ""  # in user, action or target
    since: str = ""  # 2026-01-31
    until: str = ""

    def to_dict(self) -> dict[str, str]:
        """The fields that are set."""
        return {name: value for name, value in vars(self).items() if value}


def search(*, user: User, wanted: Search) -> QuerySet[AuditEntry]:
    """Matching entries that the user may see, newest first. Raises Refusal 422 for a wrong day."""
    entries = audit_entries(user=user)
    if wanted.action:
        kind = wanted.action.endswith(".")
        entries = entries.filter(**{"action__startswith" if kind else "action": wanted.action})
    if wanted.user:
        entries = entries.filter(actor_name=wanted.user)
    if wanted.target:
        entries = entries.filter(target=wanted.target)
    if wanted.text:
        text = wanted.text
        entries = entries.filter(
            Q(actor_name__icontains=text) | Q(action__icontains=text) | Q(target__icontains=text)
        )
    if wanted.since:
        entries = entries.filter(time__gte=_start_of(_day("since", wanted.since)))
    if wanted.until:
        after = _day("until", wanted.until) + timedelta(days=1)
        entries = entries.filter(time__lt=_start_of(after))
    return entries


def csv_lines(entries: QuerySet[AuditEntry]) -> Iterator[str]:
    """A header and at most `MOST_ROWS` lines, newest first; texts are safe in spreadsheets."""
    yield _csv_line(COLUMNS)
    for entry in entries[:MOST_ROWS].iterator(chunk_size=2000):
        texts = (entry.actor_name, entry.action, entry.target)
        data = json.dumps(entry.data, ensure_ascii=False, sort_keys=True)
        yield _csv_line(
            [entry.time.isoformat(), *map(csv_text, (*texts, data)), str(entry.ip or "")]
        )


def _csv_line(values: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(values)
    return out.getvalue()


def _start_of(day: date) -> datetime:
    return datetime.combine(day, time.min, tzinfo=UTC)


def _day(field: str, text: str) -> date:
    try:
        return day_of(text)
    except ValueError:
        raise invalid(
            field, f"{text[:20]!r} is not a day", "Use a day such as 2026-01-31."
        ) from None
