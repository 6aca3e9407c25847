"""Sets and reads what pools guarantee to teams, and what a team holds now compared with its limits.

Does not decide anything; `ordering.guarantees` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Count, Sum

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import Team, User
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import invalid, missing_object
from orchestrator.common.redis import wake_scheduler
from orchestrator.common.units import count
from orchestrator.fleet.models import Device, Pool
from orchestrator.scheduling.models import Allocation, TeamGuarantee
from orchestrator.scheduling.placement import fair_shares


@dataclass(frozen=True)
class PoolUse:
    """Devices of a pool that a team holds now, and those that the pool guarantees it."""

    pool: str
    held: int
    guaranteed: int

    @property
    def borrowed(self) -> int:
        """Devices beyond the guarantee; other teams may take them back."""
        return max(0, self.held - self.guaranteed)


@dataclass(frozen=True)
class TeamUse:
    """What a team holds now, by pool; `notes` say which limits it exceeds and what follows."""

    pools: list[PoolUse]
    notes: list[str]

    @property
    def held(self) -> int:
        """Devices in all pools."""
        return sum(pool.held for pool in self.pools)


def pool_get(name: str) -> Pool:
    """The pool with this name. Raises 404."""
    pool = Pool.objects.filter(name=name).first()
    if pool is None:
        raise missing_object("pool", name)
    return pool


def pools_to_guarantee() -> list[Pool]:
    """The pools that Orrery's own scheduler serves, by name."""
    return list(Pool.objects.filter(engine=None).order_by("name"))


def guarantee_set(*, team: Team, pool: Pool, devices: int, by: User) -> None:
    """Guarantee the team this many devices of the pool; 0 ends the guarantee.

    Raises 403, and 422 if the pool has fewer devices than all its guarantees together, has none,
    or belongs to another engine, or if the team has no members.
    """
    accounts.require_role(by, Role.ADMIN, "guarantee devices")
    if devices < 0:
        raise invalid("devices", f"{devices} is below 0", "Enter 0 to end the guarantee.")
    with transaction.atomic():
        Pool.objects.select_for_update().get(pk=pool.pk)  # two requests may not exceed it together
        if devices:
            _require_possible(team, pool, devices)
            TeamGuarantee.objects.update_or_create(
                team=team, pool=pool, defaults={"devices": devices}
            )
        else:
            TeamGuarantee.objects.filter(team=team, pool=pool).delete()
        data = {"team": team.name, "pool": pool.name, "devices": devices}
        accounts.audit(actor=by, action="team.guarantee", target=f"team:{team.pk}", data=data)
    wake_scheduler()


def _require_possible(team: Team, pool: Pool, devices: int) -> None:
    if pool.engine_id is not None:
        raise invalid(
            "pool",
            f"the engine of pool {pool.name} schedules its runs",
            "Use a pool of Orrery's own nodes; set shares of this one in its engine.",
        )
    if not team.memberships.exists():
        raise invalid("team", f"team {team.name} has no members", "Add a member first.")
    if team.max_devices is not None and devices > team.max_devices:
        raise invalid(
            "devices",
            f"the quota of team {team.name} is {count(team.max_devices, 'device')}",
            f"Use {team.max_devices} or fewer, or raise the quota first.",
        )
    total = Device.objects.filter(node__pool=pool).count()
    if not total:
        raise invalid("pool", f"pool {pool.name} has no devices", "Add a node to it first.")
    others = TeamGuarantee.objects.filter(pool=pool).exclude(team=team)
    taken = others.aggregate(total=Sum("devices"))["total"] or 0
    if taken + devices > total:
        raise invalid(
            "devices",
            f"pool {pool.name} has {count(total, 'device')}, and {taken} are guaranteed to other "
            "teams",
            f"Use {max(0, total - taken)} or fewer.",
        )


def team_use(team: Team) -> TeamUse:
    """What the team holds and is guaranteed."""
    return team_uses([team])[team.pk]


def team_uses(teams: Iterable[Team]) -> dict[int, TeamUse]:
    """`{team's id: use}`. A run counts for the first of its owner's teams by name."""
    teams = list(teams)
    shares = fair_shares.memberships()
    held: dict[str, dict[str, int]] = {}
    rows = Allocation.objects.filter(released=None, device__isnull=False).order_by()
    counted = rows.values_list("attempt__run__owner__username", "device__node__pool__name")
    for owner, pool, devices in counted.annotate(devices=Count("pk")):
        pools = held.setdefault(shares.get(owner, ""), {})
        pools[pool] = pools.get(pool, 0) + devices
    guaranteed: dict[int, dict[str, int]] = {}
    for key, pool, devices in TeamGuarantee.objects.filter(team__in=teams).values_list(
        "team", "pool__name", "devices"
    ):
        guaranteed.setdefault(key, {})[pool] = devices
    return {
        team.pk: _use(team, held.get(team.name, {}), guaranteed.get(team.pk, {})) for team in teams
    }


def _use(team: Team, held: dict[str, int], guaranteed: dict[str, int]) -> TeamUse:
    pools = [
        PoolUse(name, held.get(name, 0), guaranteed.get(name, 0))
        for name in sorted(held.keys() | guaranteed.keys())
    ]
    total, notes = sum(held.values()), []
    if team.max_devices is not None and total > team.max_devices:
        notes.append(
            f"Team {team.name} holds {count(total, 'device')}, more than its quota of "
            f"{team.max_devices}. Its runs continue; no other run of the team starts until it "
            "holds less."
        )
    promised = sum(guaranteed.values())
    if team.max_devices is not None and promised > team.max_devices:
        notes.append(
            f"The guarantees add up to {promised}, more than the quota of {team.max_devices}; the "
            "quota is the upper limit."
        )
    return TeamUse(pools, notes)
