"""URL configuration: pages from webui, `/api/` from api."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from orchestrator.api.root import api
from webui.views.accounts import auth

urlpatterns = [
    path("api/", api.urls),
    path("admin/login/", auth.admin_login),  # the same form, limit and audit as all logins
    path("admin/", admin.site.urls),
    path("", include("orchestrator.api.urls")),  # /metrics and /health/
    path("", include("webui.urls")),
]

handler500 = "webui.views.outages.server_error"
