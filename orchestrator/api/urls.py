"""The two paths outside /api/: /metrics for scrapers, /health/ for probes and people."""

from __future__ import annotations

from django.urls import path

from orchestrator.api.health import health
from orchestrator.api.metrics import metrics

urlpatterns = [
    path("metrics", metrics, name="metrics"),
    path("health/", health, name="health"),
]
