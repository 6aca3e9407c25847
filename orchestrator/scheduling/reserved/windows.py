"""Creates, deletes and reads windows: maintenance of nodes, and their reservation for a team.

Does not place or stop runs: the policy keeps windows free, `preemption.windows` clears their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import Team, User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import conflict, invalid, missing_object
from orchestrator.common.redis import wake_scheduler
from orchestrator.common.units import is_id
from orchestrator.fleet.models import Node, Pool
from orchestrator.scheduling.models import NodeWindow
from orchestrator.scheduling.placement.capacity import Window

LONGEST: Final = timedelta(days=90)
MOST_OPEN: Final = 200  # present and future ones
PAST_SHOWN: Final = timedelta(days=30)


def windows() -> QuerySet[NodeWindow]:
    """Present and future windows, and those that ended in the last 30 days, by start."""
    rows = NodeWindow.objects.filter(end__gt=clock.now() - PAST_SHOWN)
    return rows.select_related("pool", "team").prefetch_related("nodes").order_by("start", "id")


def window_get(id: int | str) -> NodeWindow:
    """The window. Raises 404."""
    row = windows().filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("window", id)
    return row


def window_create(
    *,
    by: User,
    pool: str,
    nodes: Sequence[str],
    start: datetime,
    end: datetime,
    team: str = "",
    reason: str = "",
) -> NodeWindow:
    """Reserve nodes of a pool, all if none is named, for a team; without team for maintenance.

    Raises 403, 422, and 409 if a window of other use overlaps on the same nodes.
    """
    accounts.require_role(by, Role.OPERATOR, "reserve nodes")
    row = Pool.objects.filter(name=pool).first()
    if row is None:
        raise invalid("pool", f"there is no pool {pool[:80]!r}", "Use the name of a pool.")
    if row.engine_id is not None:
        raise invalid(
            "pool",
            f"the engine of pool {pool} schedules its runs",
            "Use a pool of Orrery's own nodes.",
        )
    owner = _team(team)
    _require_times(start, end)
    if len(reason) > 200:
        raise invalid("reason", "the reason is longer than 200 characters", "Use a shorter one.")
    with transaction.atomic():
        Pool.objects.select_for_update().get(pk=row.pk)
        chosen = _nodes(row, nodes)
        _require_no_overlap(row, chosen, owner, start, end)
        window = NodeWindow.objects.create(
            pool=row,
            team=owner,
            reason=reason.strip(),
            start=start,
            end=end,
            created_by=by.username,
        )
        window.nodes.set(chosen)
        data = {
            "pool": row.name,
            "nodes": [node.name for node in chosen],
            "team": owner.name if owner else "",
            "start": start.isoformat(),
            "end": end.isoformat(),
            "reason": window.reason,
        }
        accounts.audit(actor=by, action="window.create", target=f"window:{window.pk}", data=data)
    wake_scheduler()
    return window


def window_delete(*, window: NodeWindow, by: User) -> None:
    """Delete the window; its nodes take runs again at once. Raises 403."""
    accounts.require_role(by, Role.OPERATOR, "reserve nodes")
    with transaction.atomic():
        data = {"pool": window.pool.name, "start": window.start.isoformat()}
        accounts.audit(actor=by, action="window.delete", target=f"window:{window.pk}", data=data)
        window.delete()
    wake_scheduler()


def remove_node(*, node: Node, by: User) -> None:
    """Delete the windows of this node alone, before the node: without nodes they mean the pool.

    The caller deletes the node in the same transaction. Raises 403.
    """
    # no window may be created meanwhile that names the node
    Pool.objects.select_for_update().get(pk=node.pool_id)
    rows = NodeWindow.objects.filter(nodes=node).select_related("pool")
    others = Node.objects.filter(windows=OuterRef("pk")).exclude(pk=node.pk)
    for window in rows.exclude(Exists(others)):
        window_delete(window=window, by=by)


def of_nodes(now: datetime) -> dict[int, tuple[Window, ...]]:
    """`{node's primary key: its present and future windows by start}` as policy input."""
    rows = list(
        NodeWindow.objects.filter(end__gt=now)
        .order_by("start", "id")
        .values_list("pool_id", "nodes", "team__name", "start", "end")
    )
    if not rows:
        return {}
    pools = {pool for pool, node, *_ in rows if node is None}
    members: dict[int, list[int]] = {}
    for node, pool in Node.objects.filter(pool__in=pools).values_list("pk", "pool_id"):
        members.setdefault(pool, []).append(node)
    matches: dict[int, list[Window]] = {}
    for pool, node, team, start, end in rows:
        window = Window(start.timestamp(), end.timestamp(), team or "", whole_pool=node is None)
        for each in [node] if node is not None else members.get(pool, []):
            matches.setdefault(each, []).append(window)
    return {node: tuple(each) for node, each in matches.items()}


def next_boundary(now: datetime) -> datetime | None:
    """When the next window starts or ends."""
    rows = NodeWindow.objects.filter(end__gt=now).values_list("start", "end")
    return min((time for row in rows for time in row if time > now), default=None)


def _team(name: str) -> Team | None:
    if not name:
        return None
    team = Team.objects.filter(name=name).first()
    if team is None:
        raise invalid(
            "team", f"there is no team {name[:80]!r}", "Use a team, or omit it for maintenance."
        )
    if not team.memberships.exists():
        raise invalid(
            "team", f"team {name} has no members, so no run could use the nodes", "Add a member."
        )
    return team


def _require_times(start: datetime, end: datetime) -> None:
    now = clock.now()
    if end <= start:
        raise invalid("end", "the window ends before it starts", "Use a time after its start.")
    if end <= now:
        raise invalid("end", "the window has passed", f"Use a time after {_text(now)} UTC.")
    if end - start > LONGEST:
        raise invalid(
            "end",
            f"the window lasts {(end - start).days} days; at most {LONGEST.days}",
            "Drain the nodes or move them to another pool instead.",
        )
    if NodeWindow.objects.filter(end__gt=now).count() >= MOST_OPEN:
        raise conflict(
            f"There are already {MOST_OPEN} upcoming windows, the maximum. Delete some first."
        )


def _nodes(pool: Pool, names: Sequence[str]) -> list[Node]:
    wanted = [name.strip() for name in names if name.strip()]
    matches = {node.name: node for node in Node.objects.filter(name__in=wanted, pool=pool)}
    if missing := [name for name in wanted if name not in matches]:
        raise invalid(
            "nodes",
            f"pool {pool.name} has no node {missing[0][:80]!r}",
            "Use names of nodes of this pool, or omit them to reserve all nodes.",
        )
    if not wanted and not pool.nodes.exists():
        raise invalid("pool", f"pool {pool.name} has no nodes", "Add a node to it first.")
    return [matches[name] for name in dict.fromkeys(wanted)]


def _require_no_overlap(
    pool: Pool, nodes: Sequence[Node], team: Team | None, start: datetime, end: datetime
) -> None:
    same = NodeWindow.objects.filter(pool=pool, start__lt=end, end__gt=start)
    if nodes:
        same = same.filter(Q(nodes__in=nodes) | Q(nodes=None))
    other = same.exclude(team=team) if team else same.exclude(team=None)
    if (first := other.select_related("team").order_by("start").first()) is not None:
        use = f"team {first.team.name}" if first.team else "maintenance"
        raise conflict(
            f"Nodes of pool {pool.name} are reserved for {use} from {_text(first.start)} to "
            f"{_text(first.end)} UTC. Choose other nodes or another time, or delete that window.",
            type="window-overlaps",
        )


def _text(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M}"
