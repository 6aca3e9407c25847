"""Alerts, the rules that open them, acknowledgements and mutes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.alerts import selectors, services
from orchestrator.alerts.builtin import BUILTINS
from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import MAX_ID
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.problems import invalid
from orchestrator.api.schemas.base import Id, Time
from workers.contracts.base import Contract

router = Router(tags=["alerts"])
rules = Router(tags=["alerts"])


class AlertOut(Schema):
    """One rule about one run or node, from its begin to its end."""

    id: Id
    source: str = Field(description="rule:ID, or a built-in rule's name")
    name: str
    state: str
    run: Id | None
    node: str | None
    subject: str
    message: str
    value: float | None
    fired: Time | None
    resolved: Time | None
    acknowledged: Time | None
    acknowledged_by: str | None


class NewRule(Contract):
    """A rule to create."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    kind: Annotated[
        str, Field(description="threshold, nan, no_progress, slow, idle, cost or state")
    ]
    metric: Annotated[str, Field(max_length=120, description="of threshold and nan")] = ""
    operator: Literal["<", ">"] = ">"
    threshold: Annotated[
        float | None,
        Field(
            description="threshold: the metric's unit; no_progress: seconds; slow and idle: a "
            "fraction; cost: device-hours"
        ),
    ] = None
    state: Annotated[str, Field(description="of state: finished, failed or cancelled")] = ""
    for_s: Annotated[float, Field(ge=0, description="how long the condition must hold")] = 0.0
    query: Annotated[
        str, Field(max_length=2000, description="which runs, as in the runs table")
    ] = ""
    scope: Annotated[str, Field(description="own: your runs; team: all that you see")] = "own"


class RuleOut(Schema):
    """A rule; `problem` says why it could not be evaluated."""

    id: Id
    name: str
    kind: str
    metric: str
    operator: str
    threshold: float | None
    state: str
    for_s: float
    query: str
    scope: str
    enabled: bool
    problem: str
    created: Time


class RuleChange(Contract):
    """What to change of a rule."""

    enabled: bool


class Mute(Contract):
    """What to mute for you."""

    source: Annotated[str, Field(max_length=40, description="of an alert, or a built-in rule")]
    subject: Annotated[str, Field(max_length=100, description="of an alert; empty: all")] = ""
    hours: Annotated[float | None, Field(gt=0, le=8760, description="null: without an end")] = None


class MuteOut(Schema):
    """A mute; `until` null: without an end."""

    source: str
    subject: str
    until: Time | None


@router.get("", response=list[AlertOut], auth=require_scope("read"), summary="List alerts")
@paginated(name="alerts", serialize=selectors.serialize_alert, newest_first=True)
def alert_list(request: HttpRequest, state: Literal["firing", "resolved"] | None = None) -> Any:
    """Alerts about what you see, and of your rules, newest first."""
    return selectors.alerts_visible_to(user=user(request), state=state or "")


@router.post(
    "/{int:id}/acknowledge", response=AlertOut, auth=require_scope("runs"), summary="Acknowledge"
)
def acknowledge(request: HttpRequest, id: int) -> Any:
    """Records that you take care of the alert. A repeated call changes nothing."""
    by = user(request)
    alert = selectors.alert_get(user=by, id=min(id, MAX_ID))
    return selectors.serialize_alert(services.alert_acknowledge(alert=alert, by=by))


@router.get("/mutes", response=list[MuteOut], auth=require_scope("read"), summary="List mutes")
@paginated(name="alert-mutes", key=lambda row: row.pk)
def mute_list(request: HttpRequest) -> Any:
    """Your mutes that have not ended."""
    return sorted(selectors.mutes_of(user=user(request)).values(), key=lambda row: row.pk)


@router.put("/mutes", response=MuteOut, auth=require_scope("runs"), summary="Mute")
def mute_set(request: HttpRequest, body: Mute) -> Any:
    """Sends you no messages of a rule, about one subject or all."""
    by = user(request)
    if body.source not in selectors.sources_of(user=by):
        names = ", ".join(BUILTINS)
        raise invalid("source", f"{body.source!r} is not a rule of yours", f"Use rule:ID, {names}.")
    return services.mute(by=by, **body.model_dump())


@router.delete("/mutes", response={204: None}, auth=require_scope("runs"), summary="Unmute")
def mute_end(request: HttpRequest, source: str, subject: str = "") -> HttpResponse:
    """Ends a mute."""
    services.unmute(by=user(request), source=source, subject=subject)
    return HttpResponse(status=204)


@rules.get("", response=list[RuleOut], auth=require_scope("read"), summary="List your rules")
@paginated(name="alert-rules", serialize=selectors.serialize_rule, newest_first=True)
def rule_list(request: HttpRequest) -> Any:
    """Your rules, newest first. Built-in rules are on for everyone and not listed."""
    return selectors.rules_of(user=user(request))


@rules.post("", response={201: RuleOut}, auth=require_scope("runs"), summary="Create a rule")
@creates(RuleOut)
def rule_create(request: HttpRequest, body: NewRule) -> Any:
    """Creates a rule; it is evaluated every 30 seconds."""
    rule = services.rule_create(by=user(request), **body.model_dump())
    return selectors.serialize_rule(rule)


@rules.patch("/{int:id}", response=RuleOut, auth=require_scope("runs"), summary="Turn on or off")
def rule_change(request: HttpRequest, id: int, body: RuleChange) -> Any:
    """Turns your rule on or off; off ends its open alerts."""
    by = user(request)
    rule = selectors.rule_get(user=by, id=min(id, MAX_ID))
    return selectors.serialize_rule(services.rule_enable(rule=rule, enabled=body.enabled, by=by))


@rules.delete("/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete")
def rule_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes your rule with its alerts."""
    by = user(request)
    services.rule_delete(rule=selectors.rule_get(user=by, id=min(id, MAX_ID)), by=by)
    return HttpResponse(status=204)
