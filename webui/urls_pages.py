"""URLs of login, lists, forms, fleet, planner and account pages."""

from __future__ import annotations

from django.urls import URLPattern, path

from webui.planner import explain, export, page, saved_plans, serving_scaling
from webui.views import account, auth, compare, experiments, fleet, new_run, queue, runs

urlpatterns: list[URLPattern] = [
    path("login/", auth.log_in, name="login"),
    path("logout/", auth.log_out, name="logout"),
    path("runs/", runs.runs, name="runs"),
    path("runs/bulk/", runs.bulk, name="runs-bulk"),
    path("runs/compare/", compare.compare, name="runs-compare"),
    path("runs/new/", new_run.new_run, name="run-new"),
    path("runs/check/", new_run.check, name="run-check"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("join-node/", fleet.join, name="node-join"),
    path("fleet/<str:name>/", fleet.node, name="node"),
    path("fleet/<str:name>/drain/", fleet.drain, name="node-drain"),
    path("fleet/<str:name>/undrain/", fleet.undrain, name="node-undrain"),
    path("queue/", queue.queue, name="queue"),
    path("queue/<int:id>/priority/", queue.priority, name="queue-priority"),
    path("experiments/", experiments.experiments, name="experiments"),
    path("experiments/new/", experiments.create, name="experiment-new"),
    path("experiments/<int:id>/", experiments.experiment, name="experiment"),
    path("experiments/<int:id>/edit/", experiments.edit, name="experiment-edit"),
    path("planner/", page.planner, name="planner"),
    path("planner/answer/", page.answer, name="planner-answer"),
    path("planner/shape/", page.shape, name="planner-shape"),
    path("planner/why/", explain.why, name="planner-why"),
    path("planner/export/", export.export, name="planner-export"),
    path("planner/serving/", serving_scaling.serving, name="planner-serving"),
    path("planner/scaling/", serving_scaling.scaling, name="planner-scaling"),
    path("planner/examples/", serving_scaling.examples, name="planner-examples"),
    path("planner/saved/", saved_plans.saved, name="planner-saved"),
    path("planner/save/", saved_plans.save, name="planner-save"),
    path("planner/saved/<int:id>/forget/", saved_plans.forget, name="planner-forget"),
    path("account/", account.account, name="account"),
    path("account/password/", account.password, name="password"),
    path("account/tokens/", account.tokens, name="tokens"),
    path("account/tokens/<int:id>/revoke/", account.token_revoke, name="token-revoke"),
    path("account/audit/", account.audit, name="audit"),
    path("account/people/", account.people, name="people"),
    path("account/people/<str:username>/role/", account.role_set, name="role"),
    path("account/settings/", account.installation, name="settings"),
]
