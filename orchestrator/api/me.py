"""Who I am to this installation. Reads the caller only."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.api.http.auth import caller, needs
from orchestrator.api.schemas import MeOut

router = Router(tags=["accounts"])


@router.get("", response=MeOut, auth=needs("read"), summary="The caller, with what they may do")
def me(request: HttpRequest) -> dict[str, Any]:
    who = caller(request)
    return {
        "id": who.user.pk,
        "username": who.user.get_username(),
        "role": who.user.role,
        "scopes": sorted(who.scopes),
        "teams": [team.name for team in who.user.teams.all()],
        "token": who.token.name if who.token else None,
    }
