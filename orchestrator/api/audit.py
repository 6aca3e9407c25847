"""The audit log, newest first. For administrators; reads only."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.accounts import selectors
from orchestrator.api.http.auth import needs, user
from orchestrator.api.http.pagination import Page, paged_query
from orchestrator.api.schemas import AuditOut, PageOf

router = Router(tags=["accounts"])


@router.get(
    "", response=PageOf[AuditOut], auth=needs("admin"), summary="Who did what, newest first"
)
def audit(
    request: HttpRequest, page: Page, action: str | None = None, target: str | None = None
) -> dict[str, Any]:
    rows = selectors.audit_entries(user=user(request)).order_by("-id")
    if action:
        rows = rows.filter(action=action)
    if target:
        rows = rows.filter(target=target)
    return paged_query(rows, page, "audit", lambda entry: entry, newest_first=True)
