"""Starts a login at the identity provider; the callback is allauth's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from allauth.socialaccount.providers.openid_connect import views
from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST
from requests import RequestException

from webui.oidc.adapters import PROVIDER
from webui.views.accounts.auth import login_refused

log = logging.getLogger("orrery.login")


@never_cache
@require_POST
def start(request: HttpRequest) -> HttpResponseBase:
    """Redirect to the provider; a page with the reason if it does not answer."""
    return _answer(views.login, request, PROVIDER)


@never_cache
def callback(request: HttpRequest, provider_id: str) -> HttpResponseBase:
    """The provider sends the person back to this page."""
    return _answer(views.callback, request, provider_id)


def _answer(
    view: Callable[..., HttpResponseBase], request: HttpRequest, provider_id: str
) -> HttpResponseBase:
    """The view's response; the login page with the reason if the provider does not answer."""
    try:
        return view(request, provider_id=provider_id)
    except (RequestException, ValueError, KeyError) as error:
        log.warning("The identity provider does not answer: %s", error)
        detail = _("%(name)s does not answer. Try again later, or log in with a password.")
        return login_refused(request, detail % {"name": settings.ENV.oidc_name}, status=503)
