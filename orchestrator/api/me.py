"""GET me: the authenticated caller."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import caller, require_scope
from orchestrator.api.schemas.accounts import MeOut

router = Router(tags=["accounts"])


@router.get("", response=MeOut, auth=require_scope("read"), summary="Get the caller")
def me(request: HttpRequest) -> dict[str, Any]:
    """The authenticated user with role, teams and the scopes of this call."""
    who = caller(request)
    return {
        "id": who.user.pk,
        "username": who.user.get_username(),
        "role": who.user.role,
        "scopes": sorted(who.scopes),
        "teams": [team.name for team in who.user.teams.all()],
        "token": who.token.name if who.token else None,
    }
