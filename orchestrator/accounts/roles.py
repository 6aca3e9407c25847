"""Roles and token scopes, as plain tables. Knows no view and no database."""

from __future__ import annotations

from django.db import models


class Role(models.TextChoices):
    VIEWER = "viewer", "viewer"  # sees everything a team shares
    SUBMITTER = "submitter", "submitter"  # and submits and manages own runs
    OPERATOR = "operator", "operator"  # and manages everybody's runs, nodes and pools
    ADMIN = "admin", "admin"  # and people, tokens, settings


# scope → the least role that may hold it
SCOPES: dict[str, Role] = {
    "read": Role.VIEWER,
    "runs": Role.SUBMITTER,
    "ingest": Role.SUBMITTER,
    "fleet": Role.OPERATOR,
    "admin": Role.ADMIN,
}

_RANK = {Role.VIEWER: 0, Role.SUBMITTER: 1, Role.OPERATOR: 2, Role.ADMIN: 3}


def at_least(role: str, wanted: Role) -> bool:
    return _RANK[Role(role)] >= _RANK[wanted]


def scopes_of(role: str) -> list[str]:
    """The scopes that a role may use, in table order."""
    return [scope for scope, least in SCOPES.items() if at_least(role, least)]
