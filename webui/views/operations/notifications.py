"""The page of notifications: subscriptions of the user, delivery log, test message."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.background_jobs.notifications import subscriptions
from orchestrator.common.errors import Refusal
from webui.views.access import PageRequest, field_errors, has_role, page, redirect_with_message

SHOWN = 30
_EVENTS = {
    "run_finished": gettext_noop("a run finished"),
    "run_failed": gettext_noop("a run failed"),
    "run_cancelled": gettext_noop("a run was cancelled"),
    "run_hang": gettext_noop("an attempt hung"),
    "node_lost": gettext_noop("a node is lost"),
    "node_cordoned": gettext_noop("a node or device is cordoned because of faults"),
    "alert": gettext_noop("an alert fired or ended"),
    "budget": gettext_noop("a team used 80% or all of its monthly budget"),
    "usage_weekly": gettext_noop("usage report of each week"),
    "usage_monthly": gettext_noop("usage report of each month"),
}
_CHANNELS = {
    "webhook": gettext_noop("signed webhook"),
    "slack": gettext_noop("Slack-compatible webhook"),
    "email": gettext_noop("e-mail"),
}
_SCOPES = {"own": gettext_noop("my runs"), "team": gettext_noop("all runs I can see")}


@page
@never_cache
@require_http_methods(["GET", "POST"])
def notifications(request: PageRequest) -> HttpResponse:
    """List subscriptions and create one; its secret is only in the response to that POST."""
    user, status = request.user, 200
    context: dict[str, Any] = {
        "events": [(name, _(text)) for name, text in _EVENTS.items()],
        "channels": [(name, _(text)) for name, text in _CHANNELS.items()],
        "scopes": [(name, _(text)) for name, text in _SCOPES.items()],
        "chosen": {"events": list(_EVENTS)},
        "may_create": has_role(user, Role.SUBMITTER),
    }
    if request.method == "POST":
        typed = request.POST
        try:
            row, secret = subscriptions.subscription_create(
                by=user,
                name=typed.get("name", ""),
                channel=typed.get("channel", ""),
                target=typed.get("target", ""),
                events=typed.getlist("events"),
                scope=typed.get("scope", "own"),
            )
            context |= {"created": row, "secret": secret}
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
            context["chosen"] = {**typed.dict(), "events": typed.getlist("events")}
            status = refusal.status
    context["subscriptions"] = subscriptions.subscriptions_of(user=user)
    context["deliveries"] = subscriptions.deliveries_of(user=user)[:SHOWN]
    return render(request, "webui/notifications.html", context, status=status)


@page
@require_POST
def delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a subscription."""
    row = subscriptions.subscription_get(user=request.user, id=id)
    subscriptions.subscription_delete(subscription=row, by=request.user)
    return redirect_with_message(request, _("The subscription is deleted."), "notifications")


@page
@require_POST
def test(request: PageRequest, id: int) -> HttpResponse:
    """Queue a test message."""
    row = subscriptions.subscription_get(user=request.user, id=id)
    subscriptions.test_send(subscription=row, by=request.user)
    return redirect_with_message(
        request, _("The test message is queued; reload this page for its result."), "notifications"
    )
