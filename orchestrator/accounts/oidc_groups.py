"""Maps groups of an identity provider to the role of the account and to teams, by settings.

Does not depend on a library for OpenID Connect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from orchestrator.accounts import services, teams
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least

REFUSE: Final = "none"  # default role: users without a group that has a role may not log in
EVERY_GROUP: Final = "*"


class MappingError(ValueError):
    """A setting that cannot be read; the message says which entry."""


@dataclass(frozen=True)
class GroupMapping:
    """`roles`: group → role. `teams`: group → (team, role there). `default`: role of all others.

    `every_group`: each group is a team of the same name, with this role.
    """

    roles: Mapping[str, Role] = field(default_factory=dict)
    teams: Mapping[str, tuple[str, Role]] = field(default_factory=dict)
    default: str = Role.SUBMITTER.value
    every_group: Role | None = None

    @classmethod
    def parse(cls, roles: Sequence[str], team_entries: Sequence[str], default: str) -> GroupMapping:
        """Read the settings: `GROUP=ROLE` and `GROUP=TEAM[:ROLE]` or `*[:ROLE]`.

        Raises MappingError.
        """
        if default not in (*Role.values, REFUSE):
            raise MappingError(f"ORRERY_OIDC_DEFAULT_ROLE is {default!r}; use a role or {REFUSE}")
        by_group = {}
        for entry in roles:
            group, _, role = (part.strip() for part in entry.rpartition("="))
            if not group or role not in Role.values:
                hint = f"Use GROUP=ROLE with {', '.join(Role.values)}."
                raise MappingError(f"ORRERY_OIDC_ROLES has {entry!r}; {hint}")
            by_group[group] = Role(role)
        in_teams: dict[str, tuple[str, Role]] = {}
        every = None
        for entry in team_entries:
            left, colon, text = (part.strip() for part in entry.rpartition(":"))
            named, role = (left, text) if colon and text in Role.values else (entry.strip(), "")
            at = Role(role) if role else Role.SUBMITTER
            group, _, team = (part.strip() for part in named.partition("="))
            if named == EVERY_GROUP:
                every = at
            elif group and team:
                in_teams[group] = (team, at)
            else:
                message = f"ORRERY_OIDC_TEAMS has {entry!r}; use GROUP=TEAM or GROUP=TEAM:ROLE"
                raise MappingError(message)
        return cls(by_group, in_teams, default, every)

    def role_of(self, groups: Iterable[str]) -> Role | None:
        """The highest role of the groups, else the default; None: may not log in."""
        best: Role | None = None
        for group in groups:
            role = self.roles.get(group)
            if role is not None and (best is None or at_least(role, best)):
                best = role
        if best is None and self.default != REFUSE:
            best = Role(self.default)
        return best

    def teams_of(self, groups: Iterable[str]) -> dict[str, str]:
        """Team → role there; of several groups of a team the highest role."""
        chosen: dict[str, Role] = {}
        for group in groups:
            entry = self.teams.get(group)
            if entry is None and self.every_group is not None and group not in self.roles:
                entry = (group, self.every_group)
            if entry is not None:
                team, role = entry
                before = chosen.get(team)
                chosen[team] = role if before is None or at_least(role, before) else before
        return {team: role.value for team, role in chosen.items()}

    @property
    def managed_teams(self) -> set[str] | None:
        """The teams whose members the provider decides; None: all teams."""
        return None if self.every_group is not None else {team for team, _ in self.teams.values()}


def groups_in(claims: Mapping[str, Any], name: str) -> list[str]:
    """The groups in a claim: a list of texts, or one text; `a.b` is the key b in a."""
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def apply_groups(*, user: User, mapping: GroupMapping, groups: Sequence[str]) -> None:
    """Set the account's role and teams as the provider's groups say; nothing without a mapping."""
    role = mapping.role_of(groups)
    if mapping.roles and role is not None and user.role != role:
        services.user_role_set(user=user, role=role, by=None)
    if mapping.teams or mapping.every_group is not None:
        managed = mapping.managed_teams
        teams.memberships_replace(
            user=user, roles=mapping.teams_of(groups), managed=managed, create=True
        )


def user_for_login(*, name: str, email: str, role: Role, link_by_email: bool) -> tuple[User, bool]:
    """The account of a person who logs in for the first time, and whether it is new.

    An account with the same email is used only with `link_by_email`, for an email that the
    provider has verified. A name in use gets a number.
    """
    if link_by_email and email:
        same = list(User.objects.filter(email__iexact=email, is_active=True)[:2])
        if len(same) == 1:
            return same[0], False
    base = "".join(sign for sign in name if sign.isalnum() or sign in "@.+-_")[:140] or "user"
    taken = set(User.objects.filter(username__istartswith=base).values_list("username", flat=True))
    lower = {each.lower() for each in taken}
    username, number = base, 2
    while username.lower() in lower:
        username, number = f"{base}-{number}", number + 1
    return services.user_create(username=username, email=email, role=role), True
