"""The teams of users, their quotas and shares, and their decayed device time, as policy input.

A user who belongs to several teams counts for the first by name; one without team is a team alone.
Writes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db.models import Sum
from django.db.models.functions import TruncDay

from orchestrator.accounts.models import Team, TeamMembership
from orchestrator.common import clock
from orchestrator.scheduling.models import Allocation, DeviceTime, TeamGuarantee
from orchestrator.scheduling.ordering.decayed_usage import HALF_LIFE_S, DecayedUsage

_HALF_LIVES = 4  # older usage weighs less than 1/16
_FRESH = timedelta(seconds=60)  # past usage is read again after this time


@dataclass(frozen=True)
class FairShares:
    """Teams by name; `team_of` maps user names."""

    team_of: dict[str, str] = field(default_factory=dict)
    quotas: dict[str, int] = field(default_factory=dict)
    usage: DecayedUsage = field(default_factory=DecayedUsage)
    # (pool, team) → devices
    guarantees: dict[tuple[str, str], int] = field(default_factory=dict)

    def team(self, owner: str) -> str:
        """The team that the owner's runs count for."""
        return self.team_of.get(owner) or f"{owner} (no team)"


def read() -> FairShares:
    """Teams now; past usage at most a minute old."""
    team_of = memberships()
    limits = list(Team.objects.values_list("name", "max_devices", "share"))
    return FairShares(
        team_of,
        {name: most for name, most, _ in limits if most is not None},
        _usage(team_of, {name: share for name, _, share in limits}),
        {
            (pool, team): devices
            for pool, team, devices in TeamGuarantee.objects.values_list(
                "pool__name", "team__name", "devices"
            )
        },
    )


def memberships() -> dict[str, str]:
    """`{user name: the team that the user's runs count for}`: the first by name."""
    members = TeamMembership.objects.order_by("-team__name")
    return dict(members.values_list("user__username", "team__name"))


_past: tuple[datetime | None, list[tuple[str, float, float]]] = (None, [])


def forget() -> None:
    """Read past usage again at the next call; for tests."""
    global _past
    _past = (None, [])


def _usage(team_of: dict[str, str], shares: dict[str, float]) -> DecayedUsage:
    now = clock.now()
    usage, time = DecayedUsage(shares=shares), now.timestamp()
    for owner, when, seconds in _recent(now):
        decay = 0.5 ** (max(0.0, time - when) / HALF_LIFE_S)
        usage.add(team_of.get(owner) or f"{owner} (no team)", owner, seconds * decay, time)
    return usage


def _recent(now: datetime) -> list[tuple[str, float, float]]:
    """`(owner, Unix seconds, device-seconds)` of ended and open attempts, by owner and day."""
    global _past
    read, rows = _past
    if read is not None and timedelta(0) <= now - read < _FRESH:
        return rows
    since = now - timedelta(seconds=_HALF_LIVES * HALF_LIFE_S)
    ended = (
        DeviceTime.objects.filter(ended__gte=since)
        .annotate(day=TruncDay("ended"))
        .values_list("attempt__run__owner__username", "day")
        .annotate(total=Sum("allocated"))
        .order_by()
    )
    rows = [(owner, day.timestamp(), total) for owner, day, total in ended if day is not None]
    held: dict[str, float] = defaultdict(float)
    open_rows = Allocation.objects.filter(released=None).values_list(
        "attempt__run__owner__username", "created"
    )
    for owner, created in open_rows:
        held[owner] += max(0.0, (now - created).total_seconds())
    rows += [(owner, now.timestamp(), seconds) for owner, seconds in held.items()]
    _past = (now, rows)
    return rows
