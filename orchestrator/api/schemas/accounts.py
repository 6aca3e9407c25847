"""Responses about users, tokens and the audit log."""

from __future__ import annotations

from typing import Any

from ninja import Schema
from pydantic import Field

from orchestrator.api.schemas.base import Id, Time


class TokenOut(Schema):
    """An API token, without its text."""

    id: Id
    name: str
    prefix: str
    scopes: list[str]
    created: Time
    expires: Time | None
    last_used: Time | None
    revoked: Time | None


class NewTokenOut(TokenOut):
    """A created API token, with its text."""

    token: str = Field(description="shown only here; Orrery stores its digest")


class MeOut(Schema):
    """The authenticated caller."""

    id: Id
    username: str
    role: str
    scopes: list[str]
    teams: list[str]
    token: str | None = Field(description="name of this call's token; null for a session")


class AuditOut(Schema):
    """An entry of the audit log."""

    id: Id
    time: Time
    actor: str
    action: str
    target: str
    data: dict[str, Any]
    ip: str | None

    @staticmethod
    def resolve_actor(entry: Any) -> str:
        """The name of the user, also after the user was deleted."""
        return str(entry.actor_name)
