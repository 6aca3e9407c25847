"""URLs of all pages; `urls_main` holds overview, run and gallery, `urls_pages` the rest."""

from __future__ import annotations

from django.conf import settings
from django.urls import include, path

urlpatterns = [path("", include("webui.urls_main")), path("", include("webui.urls_pages"))]
if settings.ENV.oidc_issuer:
    urlpatterns.append(path("", include("webui.oidc.urls")))
