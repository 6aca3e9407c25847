"""The page of alerts: what fires, the rules, and the history."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.alerts import selectors, services
from orchestrator.alerts.builtin import BUILTINS
from orchestrator.common.errors import Refusal, invalid
from webui.presentation import formatting
from webui.views.access import PageRequest, field_errors, has_role, page, redirect_with_message

_SHOWN: Final = 100  # open alerts
_HISTORY: Final = 50
KINDS: Final = {
    "threshold": gettext_noop("a metric is above or below a number"),
    "nan": gettext_noop("a metric is not a finite number"),
    "no_progress": gettext_noop("nothing logged for a number of seconds"),
    "slow": gettext_noop("slower than a fraction of the predicted speed"),
    "idle": gettext_noop("device utilization below a fraction"),
    "cost": gettext_noop("more device-hours used than a limit"),
    "state": gettext_noop("the run ended in a state"),
}
_STATES: Final = {
    "failed": gettext_noop("failed"),
    "cancelled": gettext_noop("cancelled"),
    "finished": gettext_noop("finished"),
}
# of built-in rules: titles and descriptions are marked here, because the rules are pure
_BUILTIN_TEXTS: Final = {
    "not-finite": (
        gettext_noop("Loss or gradient is not finite"),
        gettext_noop("The latest loss, validation loss or gradient norm is NaN or infinite."),
    ),
    "no-progress": (
        gettext_noop("No progress"),
        gettext_noop("A running training run has logged nothing for 15 minutes."),
    ),
    "slow": (
        gettext_noop("Slower than predicted"),
        gettext_noop(
            "A training run has been below half of its predicted tokens per second for 10 minutes."
        ),
    ),
    "idle": (
        gettext_noop("Devices are idle"),
        gettext_noop(
            "The devices of a training run have been less than 5% utilized for 15 minutes."
        ),
    ),
    "node-lost": (
        gettext_noop("Node lost"),
        gettext_noop("A node stopped responding, and its runs were ended."),
    ),
}


@page
@require_http_methods(["GET", "POST"])
def alerts(request: PageRequest) -> HttpResponse:
    """List alerts and rules; a POST creates a rule."""
    user, status = request.user, 200
    context: dict[str, Any] = {"typed": request.POST}
    if request.method == "POST":
        try:
            rule = services.rule_create(by=user, **_rule(request))
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
            status = refusal.status
        else:
            message = _("The rule %(name)s is on; it is evaluated every 30 seconds.")
            return redirect_with_message(request, message % {"name": rule.name}, "alerts")
    mutes = selectors.mutes_of(user=user)
    firing = list(selectors.alerts_visible_to(user=user, state="firing")[: _SHOWN + 1])
    own = list(selectors.rules_of(user=user))
    ids = {f"rule:{rule.pk}" for rule in own}
    context |= {
        "firing": [
            (alert, selectors.is_muted(mutes, alert), alert.source in {*BUILTINS, *ids})
            for alert in firing[:_SHOWN]
        ],
        "more": len(firing) > _SHOWN,
        "history": selectors.alerts_visible_to(user=user, state="resolved")[:_HISTORY],
        "rules": [(rule, rule_text(rule), (f"rule:{rule.pk}", "") in mutes) for rule in own],
        "builtins": [
            (name, _(title), _(description), (name, "") in mutes)
            for name, (title, description) in _BUILTIN_TEXTS.items()
        ],
        "kinds": [(name, _(text)) for name, text in KINDS.items()],
        "states": [(name, _(text)) for name, text in _STATES.items()],
        "may_create": has_role(user, Role.SUBMITTER),
        "sentence": _sentence(len(firing)),
    }
    return render(request, "webui/alerts.html", context, status=status)


@page
@require_POST
def acknowledge(request: PageRequest, id: int) -> HttpResponse:
    """Acknowledge an alert."""
    alert = selectors.alert_get(user=request.user, id=id)
    services.alert_acknowledge(alert=alert, by=request.user)
    return redirect_with_message(request, _("The alert is acknowledged."), "alerts")


@page
@require_POST
def mute(request: PageRequest) -> HttpResponse:
    """Mute a rule for the user, or end the mute with `hours=0`."""
    typed = request.POST
    source, subject = typed.get("source", ""), typed.get("subject", "")[:100]
    hours = typed.get("hours", "")
    if hours == "0":
        services.unmute(by=request.user, source=source, subject=subject)
        message = _("Unmuted: you will get its messages again.")
        return redirect_with_message(request, message, "alerts")
    if source not in selectors.sources_of(user=request.user):
        raise invalid("source", _("%(source)r is not a rule of yours") % {"source": source[:40]})
    number = _number(hours, "hours") if hours else None
    services.mute(by=request.user, source=source, subject=subject, hours=number)
    message = _("Muted: you will get no messages about it.")
    return redirect_with_message(request, message, "alerts")


@page
@require_POST
def change(request: PageRequest, id: int) -> HttpResponse:
    """Turn a rule on or off, or delete it."""
    rule, action = selectors.rule_get(user=request.user, id=id), request.POST.get("action", "")
    if action == "delete":
        services.rule_delete(rule=rule, by=request.user)
        return redirect_with_message(request, _("The rule is deleted."), "alerts")
    is_on = action == "enable"
    services.rule_enable(rule=rule, enabled=is_on, by=request.user)
    message = _("The rule is on.") if is_on else _("The rule is off.")
    return redirect_with_message(request, message, "alerts")


def rule_text(rule: Any) -> str:
    """When a rule fires, in one sentence without a period."""
    number = formatting.quantity(rule.threshold, 4) if rule.threshold is not None else ""
    percent = formatting.percent(rule.threshold) if rule.threshold is not None else ""
    values = {"metric": rule.metric, "number": number, "percent": percent}
    match rule.kind:
        case "threshold" if rule.operator == "<":
            text = _("%(metric)s is below %(number)s") % values
        case "threshold":
            text = _("%(metric)s is above %(number)s") % values
        case "nan" if rule.metric:
            text = _("%(metric)s is not a finite number") % values
        case "no_progress":
            span = formatting.duration(rule.threshold)
            text = _("nothing logged for %(span)s") % {"span": span}
        case "slow":
            text = _("speed is below %(percent)s of the prediction") % values
        case "idle":
            text = _("devices are less than %(percent)s utilized") % values
        case "cost":
            text = _("more than %(number)s device-hours are used") % values
        case "state":
            text = _("the run ends as %(state)s") % {"state": _(rule.state)}
        case _:
            text = _("loss or gradient norm is not a finite number")
    if rule.for_s:
        minutes = f"{rule.for_s / 60:g}"
        text = _("%(text)s for %(minutes)s min") % {"text": text, "minutes": minutes}
    if rule.query:
        text = _("%(text)s, in runs with %(query)s") % {"text": text, "query": rule.query}
    return text


def _rule(request: PageRequest) -> dict[str, Any]:
    typed = request.POST
    threshold = typed.get("threshold", "").strip()
    return {
        "name": typed.get("name", ""),
        "kind": typed.get("kind", ""),
        "metric": typed.get("metric", ""),
        "operator": typed.get("operator", ">"),
        "threshold": _number(threshold, "threshold") if threshold else None,
        "state": typed.get("state", ""),
        "for_s": 60 * (_number(typed.get("minutes", "") or "0", "minutes")),
        "query": typed.get("query", ""),
        "scope": typed.get("scope", "own"),
    }


def _number(text: str, field: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = _("%(text)r is not a number") % {"text": text[:40]}
        raise invalid(field, message, _("Use a number such as 0.5.")) from None


def _sentence(firing: int) -> str:
    if not firing:
        return _("No alerts are firing. Rules are evaluated every 30 seconds.")
    text = ngettext("%(count)s alert is firing.", "%(count)s alerts are firing.", firing)
    return text % {"count": firing}
