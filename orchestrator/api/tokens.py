"""API tokens of the caller: list, create, revoke.

The response to the creation is the only place that shows a token's text.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import Field

from orchestrator.accounts import selectors, services
from orchestrator.accounts.roles import SCOPES
from orchestrator.api.http.auth import caller, require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import MAX_ID
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.problems import invalid, missing_object, refuse
from orchestrator.api.schemas.accounts import NewTokenOut, TokenOut
from orchestrator.api.schemas.base import aware
from workers.contracts.base import Contract

router = Router(tags=["accounts"])


class NewToken(Contract):
    """A token to create."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    scopes: Annotated[list[str] | None, Field(description="default: the scopes of this call")] = (
        None
    )
    expires: datetime | None = None


@router.get("", response=list[TokenOut], auth=require_scope("read"), summary="List tokens")
@paginated(name="tokens", newest_first=True)
def token_list(request: HttpRequest) -> Any:
    """Your tokens that are not revoked, newest first, without their texts."""
    return selectors.tokens_of(user=user(request))


@router.post(
    "",
    response={201: NewTokenOut},
    auth=require_scope("tokens"),
    summary="Create a token",
)
@creates(NewTokenOut, secret=True)
def token_create(request: HttpRequest, body: NewToken) -> dict[str, Any]:
    """Creates a token. This response is the only one that shows its text.

    Scopes default to those of this call, and cannot exceed them. A token that creates another
    passes its own expiry on: the new one ends no later.
    """
    current = caller(request)
    scopes = sorted(current.scopes) if body.scopes is None else body.scopes
    for index, scope in enumerate(scopes):
        if scope not in SCOPES:
            raise invalid(
                f"scopes.{index}", f"{scope!r} is not a scope", f"Use one of {', '.join(SCOPES)}."
            )
        if scope not in current.scopes:
            raise refuse(
                "scope-missing",
                "A token cannot have more scopes than its creator",
                403,
                f"This call has the scopes {', '.join(sorted(current.scopes))}, not {scope}.",
                [
                    {
                        "field": f"scopes.{index}",
                        "message": f"this call does not have the scope {scope}",
                        "hint": "Omit the field.",
                    }
                ],
            )
    token, text = services.token_create(
        user=current.user,
        name=body.name,
        scopes=scopes,
        expires=aware(body.expires),
        by=current.user,
        creator=current.token,
    )
    return TokenOut.from_orm(token).model_dump() | {"token": text}


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("tokens"), summary="Revoke a token"
)
def token_revoke(request: HttpRequest, id: int) -> HttpResponse:
    """Revokes the token at once. Revoking a revoked token has no effect."""
    by = user(request)
    token = selectors.token_get(user=by, id=id) if id <= MAX_ID else None
    if token is None:
        raise missing_object("token", id, "/api/v1/tokens")
    services.token_revoke(token=token, by=by)
    return HttpResponse(status=204)
