"""What teams used of their monthly budgets, and the messages that warn at 80% and 100%.

A day counts for a team if its person is a member now or was one when the day was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

from orchestrator.accounts import selectors as accounts
from orchestrator.accounts.models import Team, TeamMembership
from orchestrator.background_jobs.models import Delivery, Subscription, UsageDay
from orchestrator.common import clock
from orchestrator.common.units import iso

EVENT: Final = "budget"
LEVELS: Final = (100, 80)  # percent, at which a message is sent


@dataclass(frozen=True)
class TeamUse:
    """Device-hours of a team's members since the first day of the month (UTC)."""

    since: date
    device_hours: float
    productive_hours: float
    budget: float | None = None

    @property
    def share(self) -> float | None:
        """The used part of the budget; None without one."""
        return self.device_hours / self.budget if self.budget else None

    @property
    def level(self) -> int | None:
        """The highest level that is reached, in percent."""
        share = self.share
        if share is None:
            return None
        return next((level for level in LEVELS if 100 * share >= level), None)


def use_of(team: Team) -> TeamUse:
    """What the team used in this month."""
    return uses([team])[team.pk]


def uses(teams: Sequence[Team]) -> dict[int, TeamUse]:
    """The use of each team in this month, by key; three queries for any number of teams."""
    since = clock.now().astimezone(UTC).date().replace(day=1)
    sums = {team.pk: [0.0, 0.0] for team in teams}
    of_user: dict[int, set[int]] = {}
    memberships = TeamMembership.objects.filter(team__in=sums)
    for team_id, user_id in memberships.values_list("team", "user"):
        of_user.setdefault(user_id, set()).add(team_id)
    of_name = {team.name: team.pk for team in teams}
    rows = UsageDay.objects.filter(day__gte=since).exclude(owner=0)
    for row in rows.only("owner", "teams", "device_s", "productive_s").iterator():
        named = {of_name[name] for name in row.teams if name in of_name}
        for team_id in named | of_user.get(row.owner, set()):
            sums[team_id][0] += row.device_s / 3600
            sums[team_id][1] += row.productive_s / 3600
    return {
        team.pk: TeamUse(since, sums[team.pk][0], sums[team.pk][1], team.budget_device_hours)
        for team in teams
    }


def deliveries(subscriptions: Iterable[Subscription], *, now: datetime) -> list[Delivery]:
    """Unsaved deliveries of reached levels; each team, month and level once.

    A subscription gets those of its owner's teams; with the scope `team`, operators those of all.
    """
    wanted = [row for row in subscriptions if EVENT in row.events]
    teams = list(Team.objects.filter(budget_device_hours__gt=0)) if wanted else []
    if not teams:
        return []
    used, rows = uses(teams), []
    for row in wanted:
        own = set(TeamMembership.objects.filter(user=row.owner_id).values_list("team", flat=True))
        everyone = row.scope == "team" and accounts.sees_everyone(row.owner)
        for team in teams:
            use = used[team.pk]
            if use.level is None or not (everyone or team.pk in own):
                continue
            key = f"budget:{team.pk}:{use.since:%Y-%m}:{use.level}"
            body = _body(team, use, now)
            rows.append(
                Delivery(
                    subscription=row, key=key, event=EVENT, body=body, created=now, next_try=now
                )
            )
    return rows


def _body(team: Team, use: TeamUse, now: datetime) -> dict[str, Any]:
    share = use.share or 0.0
    text = (
        f"Team {team.name} used {use.device_hours:,.1f} of {use.budget or 0:,.1f} device-hours "
        f"({share:.0%}) in {use.since:%B %Y}."
    )
    about = {
        "name": team.name,
        "used_device_hours": round(use.device_hours, 3),
        "budget_device_hours": use.budget,
        "month": f"{use.since:%Y-%m}",
    }
    return {"event": EVENT, "time": iso(now), "text": text, "team": about}
