"""URLs of the overview, run pages and the gallery."""

from __future__ import annotations

from django.urls import URLPattern, path

from webui.views import outages
from webui.views.gallery import gallery
from webui.views.overview import overview
from webui.views.runs import fork, run, run_actions, serve_parts

urlpatterns: list[URLPattern] = [
    path("", overview.overview, name="overview"),
    path("pulse/", overview.pulse, name="overview-pulse"),
    path("outages/", outages.outages, name="outages"),
    path("runs/<int:id>/", run.run, name="run"),
    path("runs/<int:id>/pulse/", run.pulse, name="run-pulse"),
    path("runs/<int:id>/comparison/", run.comparison, name="run-comparison"),
    path("runs/<int:id>/heat/", run.heat, name="run-heat"),
    path("runs/<int:id>/timeline/", run.timeline, name="run-timeline"),
    path("runs/<int:id>/samples/", run.sample_texts, name="run-samples"),
    path("runs/<int:id>/rollouts/", run.rollout_groups, name="run-rollouts"),
    path("runs/<int:id>/engine/<str:name>/", serve_parts.part, name="run-engine"),
    path("runs/<int:id>/act/", run_actions.act, name="run-act"),
    path("runs/<int:id>/fork/", fork.fork, name="run-fork"),
    path("gallery/", gallery.gallery, name="gallery"),
]
