"""A page that lists objects and has a form that creates one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpResponse
from django.shortcuts import redirect, render

from orchestrator.common.errors import Refusal
from webui.views.access import PageRequest


def list_with_form(
    request: PageRequest,
    template: str,
    *,
    create: Callable[[PageRequest], Any],
    address: str,
    content: Callable[[], dict[str, Any]],
) -> HttpResponse:
    """Render the list; POST creates an object and redirects to its page, named `address`.

    A refused form is shown again with its values and errors.
    """
    form: dict[str, Any] = {"values": request.GET}
    status = 200
    if request.method == "POST":
        try:
            return redirect(address, create(request).pk)
        except Refusal as refusal:
            errors = refusal.errors or [{"message": refusal.detail}]
            form, status = {"errors": errors, "values": request.POST}, refusal.status
    return render(request, template, content() | form, status=status)
