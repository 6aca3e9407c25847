"""Roles and token scopes as tables. Does not depend on the database."""

from __future__ import annotations

from django.db import models


class Role(models.TextChoices):
    """What a user may do; each role includes the previous ones."""

    VIEWER = "viewer", "viewer"  # sees what the team shares
    SUBMITTER = "submitter", "submitter"  # submits and manages own runs
    OPERATOR = "operator", "operator"  # manages all runs, nodes and pools
    ADMIN = "admin", "admin"  # manages users, tokens, settings


# scope → the lowest role that may have it
SCOPES: dict[str, Role] = {
    "read": Role.VIEWER,
    "tokens": Role.VIEWER,
    "runs": Role.SUBMITTER,
    "ingest": Role.SUBMITTER,
    "fleet": Role.OPERATOR,
    "admin": Role.ADMIN,
}

_RANK = {Role.VIEWER: 0, Role.SUBMITTER: 1, Role.OPERATOR: 2, Role.ADMIN: 3}


def at_least(role: str, required: Role) -> bool:
    """Whether the role includes the required one."""
    return _RANK[Role(role)] >= _RANK[required]


def scopes_of(role: str) -> list[str]:
    """The scopes that the role may have, in table order."""
    return [scope for scope, least in SCOPES.items() if at_least(role, least)]
