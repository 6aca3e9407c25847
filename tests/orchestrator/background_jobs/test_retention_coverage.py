"""Every table has a retention policy, or a reason why it needs none."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.models import CHANGE, LogEntry

from orchestrator.accounts.models import ApiToken, User
from orchestrator.accounts.roles import Role
from orchestrator.background_jobs import retention
from orchestrator.common import clock
from orchestrator.config.env.variables import Env
from orchestrator.fleet.models import Cordon, JoinToken, NodeProbe
from orchestrator.fleet.services import join_token_create
from orchestrator.reports.models import Report, ShareLink
from tests import factories

RUNS = "with the run or attempt, the history that users want"
BOUNDED = "one row per configured or living thing"
DOCUMENTS = "what users wrote; they delete it"
TRANSIENT = "work deletes its own rows"
WITHOUT = {
    "common.WaitingFrame": TRANSIENT,
    "accounts.User": BOUNDED,
    "accounts.Team": BOUNDED,
    "accounts.TeamMembership": BOUNDED,
    "fleet.Cluster": BOUNDED,
    "fleet.Engine": BOUNDED,
    "fleet.EngineMember": RUNS,
    "fleet.Pool": BOUNDED,
    "fleet.Node": BOUNDED,
    "fleet.Device": BOUNDED,
    "planner.Calibration": DOCUMENTS,
    "planner.DeviceType": DOCUMENTS,
    "planner.SavedPlan": DOCUMENTS,
    "runs.DataSetVersion": DOCUMENTS,
    "runs.DataSetUse": RUNS,
    "runs.PlanTrials": RUNS,
    "runs.Experiment": DOCUMENTS,
    "runs.Run": RUNS,
    "runs.RunTag": RUNS,
    "runs.RunSecret": RUNS,
    "runs.Attempt": RUNS,
    "runs.AttemptShare": RUNS,
    "runs.StoredCopy": RUNS,
    "runs.Checkpoint": RUNS,
    "runs.Artifact": RUNS,
    "runs.StoredFolder": BOUNDED,
    "runs.NodeStore": BOUNDED,
    "runs.RunParameter": RUNS,
    "runs.ParameterName": BOUNDED,
    "device_history.IdleDevice": BOUNDED,
    "telemetry.Series": RUNS,
    "telemetry.Cursor": RUNS,
    "telemetry.Tail": RUNS,
    "telemetry.MetricSummary": RUNS,
    "telemetry.MetricName": RUNS,
    "telemetry.StaleSummary": TRANSIENT,
    "tracking.RunDetails": RUNS,
    "tracking.MediaBlob": RUNS,
    "tracking.MediaItem": RUNS,
    "reviews.Review": DOCUMENTS,
    "reviews.LineReview": DOCUMENTS,
    "reviews.LineChange": DOCUMENTS,
    "reviews.Claim": BOUNDED,
    "reviews.ModelComparison": DOCUMENTS,
    "reviews.ComparisonTurn": DOCUMENTS,
    "reviews.ReviewedFile": DOCUMENTS,
    "reviews.AnswerVote": DOCUMENTS,
    "run_table.SavedView": DOCUMENTS,
    "scheduling.Allocation": RUNS,
    "scheduling.EngineJob": RUNS,
    "scheduling.Lease": BOUNDED,
    "scheduling.QueueDecision": BOUNDED,
    "scheduling.QueueEstimate": BOUNDED,
    "scheduling.DeviceTime": RUNS,
    "scheduling.TeamGuarantee": BOUNDED,
    "scheduling.NodeWindow": DOCUMENTS,
    "sweeps.Sweep": RUNS,
    "sweeps.Trial": RUNS,
    "alerts.AlertRule": DOCUMENTS,
    "dashboards.Dashboard": DOCUMENTS,
    "reports.Report": DOCUMENTS,
    "reports.ReportVersion": DOCUMENTS,
    "reports.FrozenPanel": DOCUMENTS,
    "reports.ReportComment": DOCUMENTS,
    "jobs.Job": BOUNDED,
    "jobs.Subscription": DOCUMENTS,
    "jobs.Position": BOUNDED,
    "jobs.Export": TRANSIENT,
    "jobs.Simulation": "at most 20 per user",
    "auth.Permission": BOUNDED,
    "auth.Group": BOUNDED,
    "contenttypes.ContentType": BOUNDED,
}
POLICIES = (*retention.FREQUENT, *retention.POLICIES)
FOREVER = frozenset(
    policy.setting for policy in POLICIES if policy.setting and policy.setting != "retain_frames_s"
)


def retaining(days: float) -> Env:
    return Env(**dict.fromkeys(FOREVER, days))


def covered() -> Iterable[str]:
    for policy in POLICIES:
        rows = policy.rows(clock.now())
        assert rows is not None
        yield rows.model._meta.label


@pytest.mark.django_db
def test_every_table_has_a_policy_or_a_reason(settings: Any) -> None:
    settings.ENV = retaining(30.0)
    # django-allauth has at most one row per user, and is installed only with single sign-on
    tables = {
        model._meta.label
        for model in apps.get_models()
        if model._meta.app_label not in ("account", "socialaccount")
    }
    with_policy = set(covered())
    assert tables - with_policy - WITHOUT.keys() == set(), "add a policy, or a reason here"
    assert with_policy & WITHOUT.keys() == set()
    assert WITHOUT.keys() - tables == set()


@pytest.mark.django_db
def test_credentials_cordons_and_probes_of_long_ago_are_deleted(owner: User, settings: Any) -> None:
    settings.ENV = retaining(30.0)
    now = clock.now()
    long_ago, lately = now - timedelta(days=31), now - timedelta(days=1)
    node = factories.node("n1")
    for name, values in {
        "revoked": {"revoked": long_ago},
        "expired": {"expires": long_ago},
        "expired lately": {"expires": lately},
        "valid": {},
    }.items():
        ApiToken.objects.create(user=owner, name=name, prefix="x", digest=name, **values)
    report = Report.objects.create(owner=owner, title="r")
    for nonce, values in {
        "expired": {"expires": long_ago},
        "revoked": {"expires": now + timedelta(days=9), "revoked": long_ago},
        "valid": {"expires": now + timedelta(days=9)},
    }.items():
        ShareLink.objects.create(report=report, author=owner, nonce=nonce, **values)
    unused = join_token_create(by=factories.user("boss", Role.ADMIN)).partition(".")[0]
    JoinToken.objects.update(expires=long_ago)  # the node's is used
    for reason, lifted in {"old": long_ago, "lately": lately, "open": None}.items():
        Cordon.objects.create(node=node, cause="failures", reason=reason, lifted=lifted)
        node.cordons.filter(lifted=None).exclude(reason="open").delete()
    for days in (60, 50, 40):
        day = (now - timedelta(days=days)).date()
        NodeProbe.objects.create(node=node, day=day, state="done", time=now - timedelta(days=days))
    for time in (long_ago, lately):
        LogEntry.objects.create(
            user=owner, object_repr=str(time), action_flag=CHANGE, action_time=time
        )

    def retain(*, dry_run: bool) -> dict[str, int]:
        return retention.retain(
            policies=retention.POLICIES, now=now, dry_run=dry_run, renew=lambda: None
        )

    counted = retain(dry_run=True)
    assert retain(dry_run=False) == counted
    assert (counted["api_tokens"], counted["share_links"], counted["join_tokens"]) == (2, 2, 1)
    assert (counted["cordons"], counted["node_probes"], counted["admin_log"]) == (1, 2, 1)
    assert {token.name for token in ApiToken.objects.all()} == {"expired lately", "valid"}
    assert ShareLink.objects.get().nonce == "valid"
    assert not JoinToken.objects.filter(pk=unused).exists() and JoinToken.objects.exists()
    assert {cordon.reason for cordon in Cordon.objects.all()} == {"lately", "open"}
    assert (now.date() - NodeProbe.objects.get().day).days == 40
