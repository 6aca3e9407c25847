"""URL configuration: pages from webui, `/api/` from api."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from orchestrator.api.root import api

urlpatterns = [
    path("api/", api.urls),
    path("admin/", admin.site.urls),
    path("", include("orchestrator.api.urls")),  # /metrics and /health/
    path("", include("webui.urls")),
]
