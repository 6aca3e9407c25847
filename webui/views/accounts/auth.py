"""Login and logout pages; passwords are checked by Django."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login, logout
from django.contrib.auth.forms import AuthenticationForm
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render, resolve_url
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts import services
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from webui import login_throttle
from webui.views.access import has_role


@sensitive_post_parameters("password")
@never_cache
@require_http_methods(["GET", "POST"])
def log_in(request: HttpRequest) -> HttpResponse:
    """Show the login form; log in on POST, with a limit on wrong passwords."""
    target = _target(request)
    if request.user.is_authenticated:
        return redirect(target)
    form = AuthenticationForm(request, data=request.POST or None)
    refusal, status = None, 200
    if request.method == "POST":
        name, address = request.POST.get("username", ""), client_address(request)
        try:
            login_throttle.check(name, address)
        except Refusal as error:
            refusal, status = error, error.status
        else:
            user = form.get_user() if form.is_valid() else None
            if user is not None and not _may_use_password(user):
                refusal_text = _("Only administrators log in with passwords. Log in with %(name)s.")
                detail = refusal_text % {"name": settings.ENV.oidc_name}
                return login_refused(request, detail, status=403)
            if user is not None:
                login(request, user)
                services.audit(
                    actor=user, action="login", target=f"user:{user.pk}", ip=address or None
                )
                if user.must_change_password:
                    messages.warning(
                        request,
                        _(
                            "You logged in with a temporary password. Choose your own under "
                            "Account, Password."
                        ),
                    )
                return redirect(target)
            login_throttle.failed(name, address)
            services.audit(
                actor=None,
                action="login.refused",
                data={"username": name[:150]},
                ip=address or None,
            )
            status = 403
    response = _login_page(request, form, refusal.detail if refusal else "", status)
    if refusal is not None:
        response["Retry-After"] = str(refusal.retry_after_s)
    return response


def login_refused(request: HttpRequest, detail: str, *, status: int) -> HttpResponse:
    """The login page with the reason why a login by the identity provider was refused."""
    return _login_page(request, AuthenticationForm(request), detail, status)


def _login_page(
    request: HttpRequest, form: AuthenticationForm, refusal: str, status: int
) -> HttpResponse:
    context = {
        "form": form,
        "next": request.POST.get("next") or request.GET.get("next", ""),
        "refusal": refusal,
        "first_login": _first_login(),
        "oidc_name": settings.ENV.oidc_name if settings.ENV.oidc_issuer else "",
        "passwords_of": settings.ENV.password_login,
    }
    return render(request, "webui/login.html", context, status=status)


@require_http_methods(["GET", "HEAD", "POST"])
def admin_login(request: HttpRequest) -> HttpResponse:
    """Send the visitor of Django's admin to the login form; checks no password itself."""
    if request.user.is_authenticated:  # logged in, and still sent here: not an administrator
        raise PermissionDenied
    target = request.GET.get("next") or reverse("admin:index")
    return redirect(f"{reverse('login')}?{urlencode({'next': target})}")


@require_POST
def log_out(request: HttpRequest) -> HttpResponse:
    """Log out and return to the login page."""
    logout(request)
    messages.info(request, _("You are logged out."))
    return redirect("login")


def _target(request: HttpRequest) -> str:
    target = request.POST.get("next") or request.GET.get("next", "")
    if url_has_allowed_host_and_scheme(
        target, {request.get_host()}, require_https=request.is_secure()
    ):
        return target
    return resolve_url(settings.LOGIN_REDIRECT_URL)


def _may_use_password(user: Any) -> bool:
    """Whether the account may log in by password: with ORRERY_PASSWORD_LOGIN=admins not all."""
    env = settings.ENV
    everyone = env.password_login == "all" or not env.oidc_issuer
    return everyone or has_role(user, Role.ADMIN)


def _first_login() -> bool:
    """Whether the password of the first start is still in use; its file is deleted with it."""
    return bool((settings.ENV.home / "first-login").exists())


def client_address(request: HttpRequest) -> str:
    """The client's address; behind our TLS proxy the last forwarded one."""
    forwarded = request.headers.get("X-Forwarded-For", "") if settings.ENV.behind_https else ""
    return forwarded.rsplit(",", 1)[-1].strip() or str(request.META.get("REMOTE_ADDR") or "")
