"""Rules, their evaluation, alerts by page and REST, and messages."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import Team
from orchestrator.alerts import selectors, services
from orchestrator.alerts.builtin import BUILTINS
from orchestrator.alerts.conditions import Condition, Facts, hit_of
from orchestrator.alerts.models import Alert, AlertRule
from orchestrator.background_jobs import retention
from orchestrator.background_jobs.models import Delivery, Subscription
from orchestrator.background_jobs.notifications import collect
from orchestrator.common.errors import Refusal
from orchestrator.config.env.variables import Env
from orchestrator.run_table import selectors as run_table
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.conftest import FakeClock
from webui.views.operations.alerts import _BUILTIN_TEXTS, KINDS, rule_text
from workers.contracts.wire.points import Point, PointBatch

NAN = math.nan
RUNNING = {"state": "running", "kind": "train"}


def log(run: Run, step: int, **values: float) -> None:
    point = Point(
        run=str(run.pk), attempt=1, rank=0, seq=step, step=step, tokens=0, time=step, values=values
    )
    telemetry.points_store(run=run, attempt=1, batches=[PointBatch.from_points([point])])


@pytest.mark.parametrize(
    ("condition", "facts", "message"),
    [
        (Condition("threshold", "x", ">", 2), {"latest": {"x": 3.0}}, "x is 3, above 2"),
        (Condition("threshold", "x", "<", 2), {"latest": {"x": 1.0}}, "x is 1, below 2"),
        (Condition("threshold", "x", ">", 2), {"latest": {"x": 2.0}}, ""),
        (Condition("threshold", "x", ">", 2), {"latest": {"x": NAN}}, ""),
        (Condition("threshold", "x", ">", 2), {}, ""),
        (Condition("nan"), {"latest": {"grad_norm": math.inf}}, "grad_norm is not a finite number"),
        (Condition("nan", "x"), {"latest": {"loss": NAN, "x": 1.0}}, ""),
        (Condition("no_progress", threshold=60), {"silent_s": 90.0}, "nothing logged for 90 s"),
        (Condition("no_progress", threshold=60), {"silent_s": None}, ""),
        (Condition("no_progress", threshold=60), {"silent_s": -5.0}, ""),  # a clock that went back
        (
            Condition("slow", threshold=0.5),
            {"latest": {"tokens_per_s": 10.0}, "prediction": {"tokens_per_s": 100.0}},
            "10 tokens/s, 10% of the prediction",
        ),
        (Condition("slow", threshold=0.5), {"latest": {"tokens_per_s": 10.0}}, ""),
        (Condition("idle", threshold=0.1), {"latest": {"device/utilization": 0.0}}, "devices are"),
        (Condition("cost", threshold=5), {"device_hours": 6.0}, "6.0 device-hours used, more than"),
        (Condition("state", state="failed"), {"state": "failed", "reason": "r"}, "The run failed"),
        (Condition("nan"), {"latest": {"loss": NAN}, "state": "finished"}, ""),
        (Condition("nan", kinds=("serve",)), {"latest": {"loss": NAN}}, ""),
    ],
)
def test_conditions(condition: Condition, facts: dict[str, Any], message: str) -> None:
    hit = hit_of(condition, Facts(**{**RUNNING, **facts}))
    assert hit is None if not message else hit is not None and hit.message.startswith(message)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"name": "", "kind": "nan"}, "name"),
        ({"name": "r", "kind": "loud"}, "kind"),
        ({"name": "r", "kind": "threshold", "threshold": 1.0}, "metric"),
        ({"name": "r", "kind": "threshold", "metric": "x"}, "threshold"),
        ({"name": "r", "kind": "cost", "threshold": NAN}, "threshold"),
        ({"name": "r", "kind": "state", "state": "running"}, "state"),
        ({"name": "r", "kind": "nan", "metric": "x" * 200}, "metric"),
        ({"name": "r", "kind": "nan", "query": "loss >"}, "query"),
        ({"name": "r", "kind": "nan", "for_s": -1.0}, "for_s"),
    ],
)
def test_a_wrong_rule_names_its_field(values: dict[str, Any], field: str, owner: Any) -> None:
    with pytest.raises(Refusal) as refused:
        services.rule_create(by=owner, **values)
    assert refused.value.errors[0]["field"] == field


def test_an_alert_opens_once_and_ends(owner: Any, live_redis: str, clock: FakeClock) -> None:
    run = factories.external_run(owner)
    log(run, 1, loss=2.0)
    assert services.evaluate() == {"fired": 0, "resolved": 0}
    log(run, 2, loss=NAN)
    assert services.evaluate() == {"fired": 1, "resolved": 0}
    assert services.evaluate() == {"fired": 0, "resolved": 0}
    alert = Alert.objects.get()
    assert (alert.source, alert.state) == ("not-finite", "firing")
    log(run, 3, loss=1.0)
    assert services.evaluate() == {"fired": 0, "resolved": 1}
    alert.refresh_from_db()
    assert alert.state == "resolved" and alert.resolved == clock.now()


def test_a_condition_must_hold_for_its_time(owner: Any, live_redis: str, clock: FakeClock) -> None:
    run = factories.external_run(owner)
    services.rule_create(
        by=owner, name="<b>high", kind="threshold", metric="<script>", threshold=5.0, for_s=60.0
    )
    log(run, 1, **{"<script>": 9.0})
    services.evaluate()
    assert Alert.objects.get().state == "pending"
    clock.advance(30)
    log(run, 2, **{"<script>": 1.0})
    services.evaluate()
    assert not Alert.objects.exists()
    log(run, 3, **{"<script>": 9.0})
    services.evaluate()
    clock.advance(60)
    assert services.evaluate()["fired"] == 1
    page = factories.client_for(owner).get("/alerts/").content.decode()
    assert "&lt;script&gt; is 9, above 5" in page and "<b>high" not in page


def test_rules_concern_the_runs_of_their_scope_and_query(
    owner: Any, teammate: Any, live_redis: str, clock: FakeClock
) -> None:
    own, other = factories.external_run(owner, name="a"), factories.external_run(teammate, name="b")
    for run in (own, other):
        log(run, 1, x=1.0)
    rule = {"kind": "threshold", "metric": "x", "threshold": 0.0}
    services.rule_create(by=owner, name="own", **rule)
    services.rule_create(by=owner, name="team", scope="team", query="name = b", **rule)
    gone = services.rule_create(by=owner, name="gone", **rule)
    AlertRule.objects.filter(pk=gone.pk).update(query="vanished > 1")
    services.evaluate()
    pairs = {(alert.name, alert.run_id) for alert in Alert.objects.all()}
    assert pairs == {("own", own.pk), ("team", other.pk)}
    gone.refresh_from_db()
    assert "vanished" in gone.problem
    assert selectors.alerts_visible_to(user=teammate).count() == 0


def test_silence_and_failure_fire_and_a_finished_run_is_quiet(
    owner: Any, live_redis: str, clock: FakeClock
) -> None:
    run = factories.external_run(owner)
    services.rule_create(by=owner, name="failed", kind="state", state="failed")
    clock.advance(1000)
    services.evaluate()
    assert Alert.objects.get().source == "no-progress"
    runs.external_finish(run=run, status="failed", reason="out of disk", by=owner)
    services.evaluate()
    states = dict(Alert.objects.values_list("name", "state"))
    assert states == {"No progress": "resolved", "failed": "firing"}
    assert "out of disk" in Alert.objects.get(name="failed").message
    clock.advance(3700)
    services.evaluate()
    assert not Alert.objects.filter(state="firing").exists()


def test_samples_of_the_machine_are_no_progress(
    owner: Any, live_redis: str, clock: FakeClock
) -> None:
    """The recorder's thread still samples while the training loop is stuck."""
    run = factories.external_run(owner)
    clock.advance(600)
    log(run, 1, loss=1.0)
    for step in (2, 3):
        clock.advance(600)
        log(run, step, **{"system/cpu": 0.0, "device/utilization": 1.0})
    services.evaluate()
    assert Alert.objects.get(source="no-progress").message == "nothing logged for 20 min"
    run.refresh_from_db()
    assert run.last_seen == clock.now()  # the program is alive, so the run does not end
    log(run, 4, loss=1.0, **{"system/cpu": 0.0})
    assert services.evaluate()["resolved"] == 1


def test_time_between_attempts_is_neither_silence_nor_cost(
    owner: Any, live_redis: str, clock: FakeClock
) -> None:
    run = factories.external_run(owner)
    Run.objects.filter(pk=run.pk).update(devices=2)
    first = Attempt.objects.get(run=run)
    clock.advance(3600)
    Attempt.objects.filter(pk=first.pk).update(ended=clock.now())
    clock.advance(7200)
    Attempt.objects.create(run=run, number=2, state="running", started=clock.now())
    services.rule_create(by=owner, name="cost", kind="cost", threshold=2.5)
    services.evaluate()
    assert not Alert.objects.exists()  # 2 device-hours, and silent since 0 s
    clock.advance(1800)
    services.evaluate()
    alerts = dict(Alert.objects.values_list("name", "message"))
    assert alerts == {
        "No progress": "nothing logged for 30 min",
        "cost": "3.0 device-hours used, more than 2.5",
    }


def test_messages_follow_subscriptions_and_mutes(
    owner: Any, teammate: Any, live_redis: str, clock: FakeClock
) -> None:
    run = factories.external_run(owner)
    for user in (owner, teammate):
        Subscription.objects.create(
            owner=user,
            name="s",
            channel="webhook",
            scope="team",
            events=["alert"],
            target="",
            host="",
            created=clock.now(),
        )
    clock.advance(1)
    services.mute(by=teammate, source="not-finite", hours=1.0)
    log(run, 1, loss=NAN)
    services.evaluate()
    collect.collect()
    collect.collect()
    (delivery,) = Delivery.objects.all()
    assert delivery.subscription.owner == owner
    assert "loss is not a finite number" in delivery.body["text"]
    log(run, 2, loss=1.0)
    services.evaluate()
    collect.collect()
    assert [row.body["alert"]["state"] for row in Delivery.objects.order_by("pk")] == [
        "firing",
        "resolved",
    ]


def test_a_rules_alerts_reach_only_its_owner_while_the_run_is_visible(
    owner: Any, teammate: Any, live_redis: str, clock: FakeClock
) -> None:
    """Not the owner's other team, and not someone who has left the run's team."""
    third = factories.user("third")
    other = Team.objects.create(name="other")
    other.members.add(owner, third)
    for user in (owner, teammate, third):
        Subscription.objects.create(
            owner=user,
            name="s",
            channel="webhook",
            scope="team",
            events=["alert"],
            target="",
            host="",
            created=clock.now(),
        )
    rule = {"kind": "threshold", "metric": "x", "threshold": 0.0, "scope": "team"}
    services.rule_create(by=owner, name="team", **rule)
    clock.advance(1)
    log(factories.external_run(teammate), 1, x=1.0)
    services.evaluate()
    collect.collect()
    assert [row.subscription.owner for row in Delivery.objects.all()] == [owner]
    assert selectors.alerts_visible_to(user=owner).count() == 1
    Team.objects.exclude(pk=other.pk).get(members=owner).members.remove(owner)
    Delivery.objects.all().delete()
    collect.collect()
    assert not Delivery.objects.exists()
    assert not selectors.alerts_visible_to(user=owner).exists()


def test_a_condition_that_comes_and_goes_opens_few_alerts(
    owner: Any, live_redis: str, clock: FakeClock
) -> None:
    run = factories.external_run(owner)
    for step in range(1, 81):  # 40 minutes
        log(run, step, loss=NAN if step % 2 else 1.0)
        services.evaluate()
        clock.advance(30)
    assert Alert.objects.count() == 4


def test_an_unexpected_error_in_a_rule_does_not_stop_the_others(
    owner: Any, live_redis: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"kind": "threshold", "metric": "x", "threshold": 0.0}
    bad = services.rule_create(by=owner, name="bad", query="name = a", **rule)
    services.rule_create(by=owner, name="good", **rule)
    log(factories.external_run(owner), 1, x=1.0)
    table_runs = run_table.table_runs

    def fail(**values: Any) -> Any:
        if values["query"] == bad.query:
            raise ZeroDivisionError
        return table_runs(**values)

    monkeypatch.setattr(run_table, "table_runs", fail)
    services.evaluate()
    assert Alert.objects.get().name == "good"


def test_alerts_of_a_rule_that_is_off_end(owner: Any, live_redis: str, clock: FakeClock) -> None:
    rule = services.rule_create(by=owner, name="r", kind="threshold", metric="x", threshold=0.0)
    log(factories.external_run(owner), 1, x=1.0)
    services.evaluate()
    AlertRule.objects.filter(pk=rule.pk).update(enabled=False)  # while another one evaluates
    assert services.evaluate()["resolved"] == 1


def test_the_end_of_a_run_is_one_message(owner: Any, live_redis: str, clock: FakeClock) -> None:
    run = factories.external_run(owner)
    services.rule_create(by=owner, name="failed", kind="state", state="failed")
    values = {"owner": owner, "name": "s", "channel": "webhook", "events": ["alert"]}
    Subscription.objects.create(**values, target="", host="", created=clock.now())
    runs.external_finish(run=run, status="failed", reason="", by=owner)
    services.evaluate()
    collect.collect()
    clock.advance(3700)
    assert services.evaluate()["resolved"] == 1
    collect.collect()
    assert [row.body["alert"]["state"] for row in Delivery.objects.all()] == ["firing"]


def test_mutes_are_limited_and_old_rows_are_deleted(
    owner: Any, live_redis: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setattr(services, "MOST_MUTES", 2)
    for subject in ("run:1", "run:2", "run:2"):
        services.mute(by=owner, source="slow", subject=subject, hours=1.0)
    with pytest.raises(Refusal, match="2 mutes"):
        services.mute(by=owner, source="slow", subject="run:3")
    run = factories.external_run(owner)
    for step, loss in ((1, NAN), (2, 1.0)):
        log(run, step, loss=loss)
        services.evaluate()
    settings.ENV = Env(retain_jobs_days=30.0)
    counts = retention.retain(
        policies=(*retention.POLICIES, *retention.FREQUENT),
        now=clock.now() + timedelta(days=31),
        dry_run=False,
        renew=lambda: None,
    )
    assert (counts["alerts"], counts["alert_mutes"]) == (1, 2)
    services.mute(by=owner, source="slow", subject="run:3")


def test_alerts_by_rest(owner: Any, teammate: Any, live_redis: str, clock: FakeClock) -> None:
    client = factories.api(owner)

    def send(method: str, path: str, body: Any) -> Any:
        call = getattr(client, method)
        return call(f"/api/v1/{path}", json.dumps(body), content_type="application/json")

    rule = {"name": "high", "kind": "threshold", "metric": "x", "threshold": 1.0}
    created = send("post", "alert-rules", rule)
    assert created.status_code == 201, created.content
    run = factories.external_run(owner)
    log(run, 1, x=2.0)
    services.evaluate()
    (alert,) = client.get("/api/v1/alerts?state=firing").json()["items"]
    assert (alert["run"], alert["value"]) == (str(run.pk), 2.0)
    done = send("post", f"alerts/{alert['id']}/acknowledge", {}).json()
    assert done["acknowledged_by"] == "owner"
    muted = send("put", "alerts/mutes", {"source": alert["source"], "hours": 2})
    assert muted.status_code == 200 and muted.json()["until"]
    assert send("put", "alerts/mutes", {"source": "rule:999"}).status_code == 422
    assert len(client.get("/api/v1/alerts/mutes").json()["items"]) == 1
    clock.advance(7201)
    assert client.get("/api/v1/alerts/mutes").json()["items"] == []
    off = send("patch", f"alert-rules/{created.json()['id']}", {"enabled": False})
    assert off.json()["enabled"] is False and Alert.objects.get().state == "resolved"


def test_the_page_creates_acknowledges_and_mutes(
    owner: Any, live_redis: str, clock: FakeClock
) -> None:
    client = factories.client_for(owner)
    page = client.get("/alerts/").content.decode()
    assert (
        "No alerts are firing" in page and "No ended alerts yet" in page and "No progress" in page
    )
    form = {"name": "high", "kind": "threshold", "metric": "x", "threshold": "much"}
    wrong = client.post("/alerts/", form)
    assert wrong.status_code == 422 and "&#x27;much&#x27; is not a number" in wrong.content.decode()
    ends = client.post("/alerts/", {"kind": "state", "state": "finished"}).content.decode()
    assert '<option value="finished" selected>' in ends, "a refused form has its choice"
    client.post("/alerts/", {**form, "threshold": "1", "minutes": "0"})
    run = factories.external_run(owner)
    log(run, 1, x=2.0)
    services.evaluate()
    alert = Alert.objects.get()
    client.post(f"/alerts/{alert.pk}/acknowledge/")
    client.post("/alerts/mute/", {"source": alert.source, "subject": alert.subject, "hours": "24"})
    page = client.get("/alerts/").content.decode()
    assert "1 alert is firing" in page and "Unmute" in page and "muted" in page
    client.post("/alerts/mute/", {"source": "slow", "hours": ""})
    assert ("slow", "") in selectors.mutes_of(user=owner)
    client.post("/alerts/mute/", {"source": "slow", "hours": "0"})
    assert ("slow", "") not in selectors.mutes_of(user=owner)
    client.post(f"/alerts/rules/{alert.rule_id}/", {"action": "delete"})
    assert not AlertRule.objects.exists() and not Alert.objects.exists()


def test_pages_name_every_rule() -> None:
    assert {name: (rule.title, rule.description) for name, rule in BUILTINS.items()} == (
        _BUILTIN_TEXTS
    )
    assert set(KINDS) == set(services.KINDS)
    texts = {
        rule_text(AlertRule(kind=kind, threshold=0.5, state="failed", metric="x", operator="<"))
        for kind in KINDS
    }
    assert len(texts) == len(KINDS)
    rule = AlertRule(kind="cost", threshold=8.0, for_s=90.0, query="lr > 1")
    text = "more than 8 device-hours are used for 1.5 min, in runs with lr > 1"
    assert rule_text(rule) == text
