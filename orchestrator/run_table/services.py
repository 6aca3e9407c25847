"""Saves and deletes views of the runs table."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from orchestrator.accounts.models import Team, User
from orchestrator.common import clock
from orchestrator.common.errors import conflict, forbidden, invalid
from orchestrator.run_table.models import SavedView

_MOST = 100  # views of a person
# what a view holds; not the page of the list
_KEYS = frozenset(
    (
        *("state", "kind", "experiment", "tag", "owner", "q", "query"),
        *("sort", "columns", "group", "pin", "widths"),
    )
)


def view_save(*, owner: User, name: str, query: str, team: str = "") -> SavedView:
    """Save a view, or replace the owner's view of that name; `query` is the URL's.

    `team` is the name of one of the owner's teams, which then sees the view. Raises 422.
    """
    name = name.strip()
    if not 1 <= len(name) <= 80 or not name.isprintable():
        raise invalid(
            "name", "a view's name has 1 to 80 characters", "Name the view after what it shows."
        )
    pairs = parse_qsl(query.lstrip("?"))
    stored = urlencode([(key, value) for key, value in pairs if key in _KEYS])
    if len(stored) > 4000:
        raise invalid("query", "the view is too long", "Remove columns or a part of the query.")
    shared = Team.objects.filter(name=team, members=owner).first() if team else None
    if team and shared is None:
        raise invalid(
            "team", f"you are not in a team {team!r}", "Use one of your teams, or omit the team."
        )
    if SavedView.objects.filter(owner=owner).exclude(name=name).count() >= _MOST:
        raise conflict(f"A person has at most {_MOST} views. Delete one first.")
    view, _ = SavedView.objects.update_or_create(
        owner=owner,
        name=name,
        defaults={"query": stored, "team": shared, "created": clock.now()},
    )
    return view


def view_delete(*, view: SavedView, by: User) -> None:
    """Delete a view. Raises 403 for a view of another person."""
    if view.owner_id != by.pk:
        raise forbidden(f"{view.name!r} belongs to {view.owner.username}, who can delete it.")
    view.delete()
