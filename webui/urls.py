"""URLs of all pages; `urls_main` holds overview, run and gallery, `urls_pages` the rest."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("", include("webui.urls_main")), path("", include("webui.urls_pages"))]
