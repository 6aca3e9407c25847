"""GET audit: the audit log, for administrators."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router

from orchestrator.accounts import selectors
from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.accounts import AuditOut

router = Router(tags=["accounts"])


@router.get("", response=list[AuditOut], auth=require_scope("admin"), summary="List audit entries")
@paginated(name="audit", newest_first=True)
def audit(request: HttpRequest, action: str | None = None, target: str | None = None) -> Any:
    """Who did what, newest first. Filter by `action` (`run.cancel`) and `target` (`run:12`)."""
    rows = selectors.audit_entries(user=user(request)).order_by("-id")
    if action:
        rows = rows.filter(action=action)
    if target:
        rows = rows.filter(target=target)
    return rows
