"""API tokens: one's own to list, make and revoke.

A token's text is in the answer that makes it, and nowhere else.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import Field

from orchestrator.accounts import selectors, services
from orchestrator.accounts.roles import SCOPES
from orchestrator.api.http.auth import caller, needs, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import LARGEST
from orchestrator.api.http.pagination import Page, paged_whole
from orchestrator.api.http.problems import invalid, not_found, refuse
from orchestrator.api.schemas import NewTokenOut, PageOf, TokenOut, aware
from workers.contracts.base import Contract

router = Router(tags=["accounts"])


class NewToken(Contract):
    name: Annotated[str, Field(min_length=1, max_length=80)]
    scopes: list[str] | None = None
    expires: datetime | None = None


@router.get("", response=PageOf[TokenOut], auth=needs("read"), summary="My tokens, newest first")
def token_list(request: HttpRequest, page: Page) -> dict[str, Any]:
    rows = selectors.tokens_of(user=user(request))
    return paged_whole(rows, page, "tokens", lambda token: token.pk, lambda token: token)


@router.post(
    "",
    response={201: NewTokenOut},
    auth=needs("read"),
    summary="Make a token; its text is shown this once",
)
@creates(NewTokenOut, secret=True)
def token_create(request: HttpRequest, body: NewToken) -> dict[str, Any]:
    """Scopes default to what the caller has; a token never reaches further than the one it was made
    with.
    """
    who = caller(request)
    scopes = sorted(who.scopes) if body.scopes is None else body.scopes
    for index, scope in enumerate(scopes):
        if scope not in SCOPES:
            raise invalid(f"scopes.{index}", f"{scope!r} is not a scope", ", ".join(SCOPES))
        if scope not in who.scopes:
            raise refuse(
                "scope-missing",
                "A token cannot give more than its maker has",
                403,
                f"You came with the scopes {', '.join(sorted(who.scopes))}; {scope} is not among "
                "them.",
                [
                    {
                        "field": f"scopes.{index}",
                        "message": f"{scope} is more than you have",
                        "hint": "leave it out",
                    }
                ],
            )
    token, text = services.token_create(
        user=who.user, name=body.name, scopes=scopes, expires=aware(body.expires), by=who.user
    )
    return TokenOut.from_orm(token).model_dump() | {"token": text}


@router.delete("/{int:id}", response={204: None}, auth=needs("read"), summary="Revoke a token")
def token_revoke(request: HttpRequest, id: int) -> HttpResponse:
    who = caller(request)
    token = selectors.token_get(user=who.user, id=id) if id <= LARGEST else None
    if token is None:
        raise not_found("token", id, "/api/v1/tokens")
    services.token_revoke(token=token, by=who.user)
    return HttpResponse(status=204)
