"""Who reads a report, and which runs they see.

A person reads with their own rights. A share link reads with the rights that its author and the
author of the shown version both have: an editor cannot show runs through the link of another
person, and a link shows no run that its author no longer sees.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run


@dataclass(frozen=True, slots=True)
class Readers:
    """Users who must all see a run. `anonymous`: the page is shown without a login."""

    users: tuple[User, ...]
    anonymous: bool = False

    @property
    def first(self) -> User:
        """The user whose names and queries apply."""
        return self.users[0]

    def visible_runs(self) -> QuerySet[Run]:
        """The runs that all of them see."""
        visible = runs.runs_visible_to(user=self.first)
        for user in self.users[1:]:
            owners = people.visible_owners(user)
            if owners is not None:
                visible = visible.filter(owner_id__in=owners)
        return visible

    def seen(self, ids: Collection[int]) -> frozenset[int]:
        """Those of the runs that all of them see."""
        if not ids:
            return frozenset()
        return frozenset(self.visible_runs().filter(pk__in=ids).values_list("pk", flat=True))


def reader(user: User) -> Readers:
    """A person who is logged in."""
    return Readers((user,))
