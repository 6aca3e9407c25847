"""`Idempotency-Key` on creating POSTs: a repeat gets the first response and creates nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Schema

from orchestrator.accounts import services
from orchestrator.api.http.auth import user
from orchestrator.api.http.problems import refuse
from orchestrator.api.http.responses import json_response

View = Callable[..., Any]


def creates(
    schema: type[Schema], *, location: str = "", secret: bool = False
) -> Callable[[View], View]:
    """Make a view's result the 201 response in `schema`, once per Idempotency-Key.

    `location` is the template of the Location header. The created object and the stored response
    commit together. A refused request stores no key. Responses with a `secret` are not stored: a
    repeat is refused and creates nothing.
    """

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def once(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            def work() -> dict[str, Any]:
                return schema.model_validate(view(request, *args, **kwargs)).model_dump(mode="json")

            key = request.headers.get("Idempotency-Key")
            if key is None:
                return _created(work(), location)
            claim = services.idempotent_begin(
                user=user(request), key=key, route=f"POST {request.path}"[:120], body=request.body
            )
            if claim.status is not None:
                return _replay(claim.answer, key, location)
            try:
                with transaction.atomic():
                    body = work()
                    services.idempotent_finish(
                        claim, status=201, answer={"secret": True} if secret else body
                    )
            except BaseException:
                services.idempotent_abandon(claim)
                raise
            return _created(body, location)

        # ninja resolves annotations in the wrapper's module; give it the view's
        once.__signature__ = inspect.signature(view, eval_str=True)  # type: ignore[attr-defined]
        return once

    return decorate


def _created(body: dict[str, Any], location: str) -> HttpResponse:
    response = json_response(body, status=201)
    if location:
        response["Location"] = location.format(**body)
    return response


def _replay(body: Any, key: str, location: str) -> HttpResponse:
    if body == {"secret": True}:
        raise refuse(
            "secret-shown-once",
            "The secret was shown once",
            409,
            f"The request with the Idempotency-Key {key!r} was executed, and only its response had "
            "the secret. Create another with a new key, and revoke the first.",
        )
    response = _created(body, location)
    response["Idempotent-Replayed"] = "true"
    return response
