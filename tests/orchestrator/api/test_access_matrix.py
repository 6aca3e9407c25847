"""Every route × every kind of caller × token scopes, against one table of rights.

A route without a row fails the test, and so does a row without a route. Each call runs in a
transaction that is rolled back.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import Team, TeamMembership, User
from orchestrator.accounts.roles import SCOPES, Role, at_least, scopes_of
from orchestrator.alerts import services as alerts
from orchestrator.alerts.models import Alert
from orchestrator.api.root import api
from orchestrator.background_jobs.exports import requests
from orchestrator.background_jobs.notifications import subscriptions
from orchestrator.background_jobs.simulations import requests as simulations
from orchestrator.common import clock
from orchestrator.dashboards import services as dashboards
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.dead_letters.services import dead_letter_add
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Node
from orchestrator.planner.models import Calibration, DeviceType, SavedPlan
from orchestrator.reports import comments as report_comments
from orchestrator.reports import services as reports
from orchestrator.reports import share_links
from orchestrator.reviews.models import ModelComparison, Review, ReviewedFile
from orchestrator.reviews.source import pack
from orchestrator.run_table import services as run_table
from orchestrator.runs import services as runs
from orchestrator.runs.models import DataSetVersion
from orchestrator.scheduling.models import NodeWindow
from orchestrator.sweeps.definition import SweepDefinition
from orchestrator.sweeps.services import sweep_create
from tests import factories
from tests.matrix import FULL
from tests.orchestrator.api.access_tables import PAGES, REST
from workers.contracts.catalog.devices import device

pytestmark = pytest.mark.django_db

SUBSCRIPTION: dict[str, Any] = {
    "name": "s",
    "channel": "webhook",
    "target": "https://example.com/hook",
    "events": ["run_failed"],
}
SWEEP: dict[str, Any] = {
    "spec": factories.spec(),
    "parameters": {"train.seed": {"values": [1]}},
}
BODIES: dict[str, dict[str, Any]] = {
    "POST v1/runs": {"spec": factories.spec()},
    "PATCH v1/runs/{int:id}": {"notes": "x"},
    "POST v1/runs/{int:id}/fork": {"step": 1},
    "POST v1/runs/{int:id}/events": {"events": []},
    "POST v1/runs/{int:id}/logs": {"lines": []},
    "POST v1/runs/{int:id}/points": {"points": []},
    "PATCH v1/runs/{int:id}/details": {"config": {"lr": 1}},
    "POST v1/runs/{int:id}/details": {"details": []},
    "POST v1/runs/{int:id}/media": {"media": []},
    "POST v1/runs/{int:id}/finish": {"status": "finished"},
    "POST v1/experiments": {"name": "another"},
    "POST v1/sweeps": {"name": "s", **SWEEP},
    "PATCH v1/experiments/{int:id}": {"notes": "x"},
    "PATCH v1/calibrations/{int:id}": {"default": True},
    "POST v1/dashboards": {"name": "d"},
    "PATCH v1/dashboards/{int:id}": {"name": "d"},
    "POST v1/dashboards/{int:id}/panels": {"id": "p", "kind": "markdown", "text": "t"},
    "POST v1/panels/data": {"panel": {"id": "p", "kind": "markdown"}},
    "POST v1/panels/expand": {"panel": {"id": "p", "kind": "markdown"}},
    "POST v1/tokens": {"name": "new"},
    "POST v1/notifications": SUBSCRIPTION,
    "PATCH v1/reviews/{int:id}/lines/{int:line}": {"version": 0},
    "POST v1/model-comparisons": {"runs": [1]},
    "POST v1/model-comparisons/{int:id}/turns": {"text": "hello"},
    "POST v1/model-comparisons/{int:id}/turns/{int:turn}/vote": {"choice": "tie"},
    "POST v1/windows": {
        "pool": "default",
        "start": "2099-01-01T00:00:00Z",
        "end": "2099-01-02T00:00:00Z",
    },
    "PUT v1/teams/{int:id}/guarantees/{pool}": {"devices": 0},
    "POST v1/alert-rules": {"name": "r", "kind": "nan"},
    "PATCH v1/alert-rules/{int:id}": {"enabled": True},
    "PUT v1/alerts/mutes": {"source": "slow"},
    "POST v1/run-views": {"name": "best", "query": "sort=loss"},
    "POST v1/reports": {"title": "r"},
    "PATCH v1/reports/{int:id}": {"version": 1, "text": "x"},
    "POST v1/reports/{int:id}/versions/{int:version}/restore": {"version": 1},
    "POST v1/reports/{int:id}/comments": {"text": "x"},
    "PATCH v1/reports/{int:id}/comments/{int:comment}": {"resolved": True},
    "POST v1/runs/{int:id}/answer-votes": {"example": 0, "choice": "tie"},
}
DEVICE = device("h100-80g").to_dict() | {"name": "d"}
LINE = {
    "model": "llama-tiny",
    "plan": {"dp": 1},
    "cluster": {"device": "h100-80g", "nodes": 1, "devices_per_node": 1},
    "workload": {"seq_len": 128},
}
QUERIES = {
    "GET v1/runs/{int:id}/series": "?name=loss",
    "GET v1/runs/{int:id}/curves": "?name=loss&name=lr",
    "GET v1/runs/groups": "?by=model",
    "DELETE v1/alerts/mutes": "?source=slow",
    "planner-export": "?to=torchtitan",
}
# refused by the row's owner rather than by the scope of its role
TEAMLESS = ("stranger", "other")


@dataclass
class World:
    """The objects of `owner` and the callers."""

    people: dict[str, User | None]
    ids: dict[str, int]

    def expected(self, name: str, scope: str, rule: str, scopes: list[str] | None) -> int:
        """The status of a refusal, or 0 for an allowed call. `scopes` None: a session."""
        user = self.people[name]
        if user is None:
            return 401
        if scope not in (scopes_of(user.role) if scopes is None else scopes):
            return 403
        return self.object_status(name, rule)

    def object_status(self, name: str, rule: str) -> int:
        user = self.people[name]
        assert user is not None
        if rule in ("see", "decide", "manage") and name in TEAMLESS:
            return 404
        if rule in ("team", "team-admin") and name in TEAMLESS:
            return 404
        if rule == "team" and name not in ("owner", "admin"):
            return 403
        if rule == "team-admin" and name != "admin":
            return 403
        if rule == "decide" and name == "viewer":
            return 403
        if rule == "manage" and name in ("viewer", "teammate"):
            return 403
        if rule == "change" and name not in ("owner", "operator", "admin"):
            return 403
        if rule == "private" and name != "owner":
            return 404
        if rule == "own" and name not in ("owner", "admin"):
            return 404
        if rule in Role.values and not at_least(user.role, Role(rule)):
            return 403
        return 0


@pytest.fixture
def world(live_redis: str, settings: Any) -> World:
    settings.ENV = settings.ENV.model_copy(update={"rate_per_minute": 0})
    roles = {
        "stranger": Role.VIEWER,
        "other": Role.SUBMITTER,
        "viewer": Role.VIEWER,
        "teammate": Role.SUBMITTER,
        "owner": Role.SUBMITTER,
        "operator": Role.OPERATOR,
        "admin": Role.ADMIN,
    }
    people = {name: factories.user(name, role) for name, role in roles.items()}
    owner = people["owner"]
    for team, members in {"lab": ("owner", "teammate", "viewer"), "rivals": ("other",)}.items():
        Team.objects.create(name=team).members.add(*(people[name] for name in members))
    TeamMembership.objects.filter(user=owner).update(role=Role.ADMIN)
    run = factories.external_run(owner)
    factories.node("n1")
    engine = engines.engine_add(by=None, name="hpc")
    engines.engine_pool_set(engine=engine, by=None, pool="hpc-low", settings={"partition": "low"})
    ids = {
        "run": run.pk,
        "artifact": runs.artifact_record(run=run, name="a", path=f"runs/{run.pk}/a").pk,
        "experiment": runs.experiment_create(owner=owner, name="question").pk,
        "sweep": sweep_create(owner=owner, name="s", definition=SweepDefinition(**SWEEP)).pk,
        "plan": SavedPlan.objects.create(owner=owner, name="plan", line=LINE).pk,
        "calibration": Calibration.objects.create(
            name="c", device="cpu", framework="orrery", document={}, rows=0, created_by=owner
        ).pk,
        "device": DeviceType.objects.create(owner=owner, name="d", entry=DEVICE).pk,
        "token": accounts.token_create(user=owner, name="t", by=owner)[0].pk,
    }
    ids["team"] = Team.objects.get(name="lab").pk
    saved = runs.checkpoint_record(run=run, attempt=1, step=1, path=f"runs/{run.pk}/step_1")
    assert saved is not None
    ids["step"] = saved.step
    ids["export"] = requests.export_request(by=owner, run=run.pk).pk
    ids["view"] = run_table.view_save(owner=owner, name="v", query="sort=loss").pk
    ids["simulation"] = simulations.simulation_request(
        by=owner, trace="philly:10:1", nodes=1, devices_per_node=8
    ).pk
    ids["window"] = NodeWindow.objects.create(
        pool=Node.objects.get(name="n1").pool,
        start=clock.now() + timedelta(days=1),
        end=clock.now() + timedelta(days=2),
    ).pk
    spec = DashboardSpec.from_dict({"panels": [{"id": "p1", "kind": "markdown"}]})
    ids["dashboard"] = dashboards.dashboard_create(owner=owner, name="d", spec=spec, run=run).pk
    rule = alerts.rule_create(by=owner, name="r", kind="nan")
    ids["rule"] = rule.pk
    ids["alert"] = Alert.objects.create(
        source="slow",
        name="Slow",
        run=run,
        subject=f"run:{run.pk}",
        state="firing",
        message="slow",
        begun=run.created,
        fired=run.created,
    ).pk
    row, _ = subscriptions.subscription_create(by=owner, **SUBSCRIPTION)
    ids["subscription"] = row.pk
    index = pack(array("Q", [0]))
    review = Review.objects.create(
        owner=owner, name="r", source="x", format="messages", lines=1, index=index
    )
    ids["review"], ids["line"] = review.pk, 1
    ids["data_set"] = ReviewedFile.objects.create(
        review=review, path="x", format="messages", lines=1, bytes=1, by="owner"
    ).pk
    DataSetVersion.objects.create(
        name="chats", version=1, owner=owner, shared=False, path="x", format="text"
    )
    comparison = ModelComparison.objects.create(
        owner=owner, runs=[run.pk, run.pk], model_ids=["a", "b"]
    )
    ids["comparison"] = comparison.pk
    ids["turn"] = comparison.turns.create(
        conversation=1, messages=[], answers=["x", "y"], first_model=0, by="owner"
    ).pk
    report = reports.report_create(owner=owner, title="r", text="text")
    ids["report"], ids["version"] = report.pk, 1
    ids["comment"] = report_comments.comment_create(report=report, by=owner, text="x").pk
    link = share_links.link_create(report=report, by=owner)
    ids["link"] = link.pk
    ids["share"] = share_links.link_token(link)  # type: ignore[assignment]
    ids["item"] = factories.image_item(run).pk
    letter = dead_letter_add(
        source="telemetry", node="n1", code="malformed", reason="r", message=b"m"
    )
    assert letter is not None
    return World({"anonymous": None, **people}, {**ids, "letter": letter.pk})


def rows(table: str) -> dict[str, tuple[str, ...]]:
    parsed = {}
    for line in table.strip().splitlines():
        first, second, *rest = line.split()
        key = f"{first} {second}" if first.isupper() else first
        parsed[key] = tuple(rest) if first.isupper() else (second, *rest)
    return parsed


def operations() -> list[str]:
    return [
        f"{method} {prefix.strip('/')}{path}"
        for prefix, router in api._routers
        for path, view in router.path_operations.items()
        for operation in view.operations
        for method in operation.methods
    ]


def pages() -> dict[str, str]:
    """`{name: route}` of everything outside the API and Django's admin."""

    def walk(patterns: Any, before: str) -> Iterator[tuple[str, str]]:
        for pattern in patterns:
            route = before + str(pattern.pattern)
            if isinstance(pattern, URLResolver):
                if not route.startswith(("api/", "admin/")):
                    yield from walk(pattern.url_patterns, route)
            elif isinstance(pattern, URLPattern) and route != "admin/login/":
                yield str(pattern.name), route

    return dict(walk(get_resolver().url_patterns, ""))


def status_of(client: Client, method: str, path: str, body: Any = None) -> int:
    """The status of a call, whose effects are undone."""
    client.raise_request_exception = False
    with transaction.atomic():
        send = getattr(client, method.lower())
        if method == "GET" or body is None:
            answer = send(path)
        else:
            answer = send(path, body, content_type="application/json")
        status = int(answer.status_code)
        if status == 302 and answer["Location"].startswith("/login/?next="):
            status = 401
        transaction.set_rollback(True)
    return status


def wrong(status: int, expected: int) -> bool:
    if expected:
        return status != expected
    return status in (401, 403, 404) or status >= 500


def clients(name: str, user: User | None) -> Iterator[tuple[str, list[str] | None, Client]]:
    """`(description, scopes, client)`: a session, a token of the role, one per scope, none."""
    if user is None:
        yield "nothing", [], Client()
        return
    yield "session", None, factories.client_for(user)
    allowed = scopes_of(user.role)
    for scopes in (allowed, [], *([scope] for scope in allowed)):
        yield f"token {scopes}", scopes, factories.api(user, scopes=scopes)


def sent(name: str, scopes: list[str] | None, scope: str, place: int) -> bool:
    """Whether the caller requests the route at `place`, which needs `scope`, by this login.

    With the reduced matrix the administrator requests every route by every login, the owner by the
    same except tokens of other scopes, and the others by session and by token in turn: of two
    callers with one role, each takes the login that the other leaves out.
    """
    if FULL or name in ("anonymous", "admin"):
        return True
    if name == "owner":
        return scopes is None or len(scopes) != 1 or scopes == [scope]
    by_session = place % 2 == 0
    return (scopes is None) == by_session and (scopes is None or len(scopes) > 1)


def test_every_route_has_a_row() -> None:
    assert set(operations()) == set(rows(REST))
    assert set(pages()) == set(rows(PAGES))
    assert {scope for scope, *_ in rows(REST).values()} == set(SCOPES)


def test_rest(world: World) -> None:
    mismatches = {}
    for index, (name, user) in enumerate(world.people.items()):
        for described, scopes, client in clients(name, user):
            for place, (row, (scope, *rule)) in enumerate(rows(REST).items()):
                if not sent(name, scopes, scope, place + index // 2):
                    continue
                method, route = row.split(" ", 1)
                path = f"/api/{filled(route, world)}{QUERIES.get(row, '')}"
                expected = world.expected(name, scope, rule[0] if rule else "", scopes)
                body = BODIES.get(row, {}) if method != "DELETE" else None
                status = status_of(client, method, path, body)
                if wrong(status, expected):
                    mismatches[f"{name}, {described}: {row}"] = (status, expected)
    assert not mismatches, "\n".join(f"{row}: {pair}" for row, pair in mismatches.items())


def test_pages(world: World) -> None:
    mismatches, routes = {}, pages()
    for name, user in world.people.items():
        session = Client() if user is None else factories.client_for(user)
        for page, (method, *rule) in rows(PAGES).items():
            client = Client()  # a page may change the cookies
            client.cookies.load({key: each.value for key, each in session.cookies.items()})
            path = f"/{filled(routes[page], world)}{QUERIES.get(page, '')}"
            if rule == ["anyone"]:
                expected = 0
            else:
                expected = (
                    401 if user is None else world.object_status(name, rule[0] if rule else "")
                )
            status = status_of(client, method, path)
            if wrong(status, expected) and not (expected == 0 and status == 503):
                mismatches[f"{name}: {page}"] = (status, expected)
    assert not mismatches, "\n".join(f"{row}: {pair}" for row, pair in mismatches.items())


def filled(route: str, world: World) -> str:
    """The route with the ids of the owner's objects."""
    kind = next((kind for part, kind in OBJECTS.items() if re.match(part, route)), "run")
    values = {"id": world.ids.get(kind, 1), "artifact": world.ids["artifact"], "step": 1}
    values |= {
        name: world.ids[name] for name in ("line", "data_set", "turn", "item", "comment", "link")
    }
    values |= {"name": "n1" if "fleet" in route else "requests", "username": "owner"}
    values |= {"version": 1, "number": 1, "token": world.ids["share"]}
    values |= {"provider_id": "sso", "pool": "default", "panel": "p1"}  # type: ignore[dict-item]
    if "jobs" in route:
        values["name"] = "retention"  # type: ignore[assignment]
    if "datasets" in route or "data/sets" in route:
        values |= {"name": "chats", "version": 1}  # type: ignore[dict-item]
    if "nodes" in route:
        values["id"] = "n1"  # type: ignore[assignment]
    if "engines" in route:
        values |= {"name": "hpc", "pool": "hpc-low"}  # type: ignore[dict-item]
    return re.sub(r"[{<](?:\w+:)?(\w+)[}>]", lambda match: str(values[match[1]]), route)


OBJECTS = {
    r"v1/alert-rules|alerts/rules": "rule",
    r"(v1/)?alerts": "alert",
    r"v1/run-views|runs/views": "view",
    r"(v1/)?experiments": "experiment",
    r"(v1/)?dashboards": "dashboard",
    r"(v1/)?sweeps": "sweep",
    r"v1/plans|planner/saved": "plan",
    r"v1/tokens|account/tokens": "token",
    r"(v1|account)/teams": "team",
    r"(v1|account)/notifications": "subscription",
    r"v1/calibrations": "calibration",
    r"(v1/)?dead-letters": "letter",
    r"v1/reviews|data/reviews": "review",
    r"v1/model-comparisons|data/comparisons": "comparison",
    r"v1/device-types": "device",
    r"(v1|account)/exports": "export",
    r"(v1/simulations|simulator)": "simulation",
    r"(v1/)?windows": "window",
    r"(v1/)?reports": "report",
}
