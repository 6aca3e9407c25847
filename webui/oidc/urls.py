"""URLs of login by OpenID Connect. The names are those that allauth looks up."""

from __future__ import annotations

from django.urls import path

from webui.oidc import views

urlpatterns = [
    path("login/oidc/", views.start, name="oidc-login"),
    path("login/oidc/<str:provider_id>/callback/", views.callback, name="openid_connect_callback"),
]
