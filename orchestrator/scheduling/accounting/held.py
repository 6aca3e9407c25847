"""Device time that attempts held within a period, with the productive and lost share of each.

Does not sum by person or pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import NamedTuple

from django.db.models import Min, Q
from django.db.models.functions import Coalesce

from orchestrator.common import clock
from orchestrator.device_history.attribution import Held
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.models import Allocation, DeviceTime

_CHUNK = 500  # ids per query


class HeldDevices(NamedTuple):
    """Devices of one attempt: `seconds`, times devices, within the period; shares of 1 of ended
    attempts.
    """

    attempt: int
    owner: int
    username: str
    pool: str
    seconds: float
    productive: float
    lost: float


def held_devices(
    *, since: datetime, until: datetime, owners: Collection[int] | None = None
) -> Iterator[HeldDevices]:
    """Every device that an attempt held between the two times; of these owners' runs, if given."""
    rows = Allocation.objects.filter(
        Q(released=None) | Q(released__gt=since), created__lt=until
    ).order_by()
    shares: dict[int, tuple[float, float]] = {}
    accounts = DeviceTime.objects.filter(ended__gt=since, allocated__gt=0)
    if owners is not None:
        rows = rows.filter(attempt__run__owner__in=owners)
        accounts = accounts.filter(attempt__run__owner__in=owners)
    for pk, allocated, productive in accounts.values_list("pk", "allocated", "productive"):
        share = productive / allocated
        shares[pk] = share, 1.0 - share
    values = rows.values_list(
        "attempt_id",
        "attempt__run__owner_id",
        "attempt__run__owner__username",
        Coalesce("device__node__pool__name", "pool_name"),
        "created",
        "released",
    )
    for attempt, owner, username, pool, created, released in values.iterator():
        end = until if released is None else min(released, until)
        seconds = max(0.0, (end - max(created, since)).total_seconds())
        yield HeldDevices(attempt, owner, username, pool, seconds, *shares.get(attempt, (0.0, 0.0)))
    yield from _in_engines(since, until, owners, shares)


def held_within(since: float, until: float) -> list[Held]:
    """Devices of nodes that attempts held between two times in Unix seconds, with the overlap."""
    start, end = clock.from_unix(since), clock.from_unix(until)
    rows = Allocation.objects.filter(
        Q(released=None) | Q(released__gt=start), device__isnull=False, created__lt=end
    ).order_by()
    result = []
    for device, attempt, created, released in rows.values_list(
        "device_id", "attempt_id", "created", "released"
    ):
        begin = created.timestamp()
        stop = until if released is None else min(until, released.timestamp())
        seconds = max(0.0, stop - max(since, begin))
        assert device is not None
        result.append(Held(device, attempt, seconds, begin, released is None))
    return result


def experiments_of(attempts: Collection[int]) -> dict[int, str]:
    """`{attempt: name of its run's experiment}`; leaves out runs without one."""
    ids, names = sorted(attempts), dict[int, str]()
    for start in range(0, len(ids), _CHUNK):
        rows = Attempt.objects.filter(pk__in=ids[start : start + _CHUNK])
        names |= dict(rows.exclude(run__experiment=None).values_list("pk", "run__experiment__name"))
    return names


def _in_engines(
    since: datetime,
    until: datetime,
    owners: Collection[int] | None,
    shares: Mapping[int, tuple[float, float]],
) -> Iterator[HeldDevices]:
    """Attempts in jobs of other engines; they hold their devices until they end."""
    rows = Attempt.objects.filter(
        Q(ended=None) | Q(ended__gt=since), engine_job__isnull=False, launched__lt=until
    )
    if owners is not None:
        rows = rows.filter(run__owner__in=owners)
    rows = rows.select_related("run__owner").only(
        "created",
        "launched",
        "ended",
        "placement",
        "run__pool_name",
        "run__owner__username",
    )
    for attempt in rows.iterator():
        if attempt.held_from is None:
            continue
        end = until if attempt.ended is None else min(attempt.ended, until)
        held_s = max(0.0, (end - max(attempt.held_from, since)).total_seconds())
        run = attempt.run
        yield HeldDevices(
            attempt.pk,
            run.owner.pk,
            run.owner.username,
            run.pool_name,
            attempt.devices * held_s,
            *shares.get(attempt.pk, (0.0, 0.0)),
        )


def first_allocation(otherwise: date) -> date:
    """The UTC day of the first allocation, or of the first launch in an engine."""
    launched = Attempt.objects.filter(engine_job__isnull=False)
    times = (
        Allocation.objects.aggregate(first=Min("created"))["first"],
        launched.aggregate(first=Min("launched"))["first"],
    )
    first = min((time for time in times if time is not None), default=None)
    return first.astimezone(UTC).date() if first else otherwise
