"""Adapters of django-allauth: who may log in by the identity provider, as which account.

Other parts of allauth (sign-up, passwords, e-mail) are not in the URLs.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from orchestrator.accounts import oidc_groups, services
from webui.views.accounts.auth import client_address, login_refused

log = logging.getLogger("orrery.login")
PROVIDER: Final = "sso"  # in the URLs of login and callback


def group_mapping() -> oidc_groups.GroupMapping:
    """The mapping of the settings."""
    env = settings.ENV
    return oidc_groups.GroupMapping.parse(env.oidc_roles, env.oidc_teams, env.oidc_default_role)


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]
    """Writes logins to the audit log; closes allauth's own sign-up."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Never: accounts come from the provider or from an administrator."""
        return False

    def post_login(self, request: HttpRequest, user: Any, **kwargs: Any) -> HttpResponse:
        """Audit the login; there is no message on the next page."""
        services.audit(
            actor=user,
            action="login",
            target=f"user:{user.pk}",
            data={"by": settings.ENV.oidc_name},
            ip=client_address(request) or None,
        )
        response: HttpResponse = super().post_login(request, user, **kwargs)
        return response

    def add_message(self, *args: Any, **kwargs: Any) -> None:
        """Show none of allauth's messages."""


class ProviderAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]
    """Creates or finds the account of a person, and sets its role and teams at every login."""

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Refuse the login, or connect the person with an account before it continues."""
        env = settings.ENV
        claims = _claims(sociallogin.account.extra_data)
        groups = oidc_groups.groups_in(claims, env.oidc_groups_claim)
        mapping = group_mapping()
        role = mapping.role_of(groups)
        if role is None:
            detail = _("None of your groups may use Orrery. Ask an administrator for access.")
            raise ImmediateHttpResponse(_refused(request, sociallogin, detail, groups))
        if sociallogin.is_existing:
            user = sociallogin.user
        else:
            email = str(claims.get("email") or "")
            name = str(claims.get("preferred_username") or email.partition("@")[0])
            if claims.get("email_verified") not in (True, "true"):
                email = ""  # people may send messages to the address of their account
            user, _new = oidc_groups.user_for_login(
                name=name, email=email, role=role, link_by_email=env.oidc_link_by_email
            )
            sociallogin.connect(request, user)
        if not user.is_active:
            detail = _("The account %(name)s is disabled. Ask an administrator.")
            values = {"name": user.username}
            raise ImmediateHttpResponse(_refused(request, sociallogin, detail % values, groups))
        oidc_groups.apply_groups(user=user, mapping=mapping, groups=groups)

    def on_authentication_error(self, request: HttpRequest, provider: Any, **kwargs: Any) -> None:
        """Show the login page with the reason instead of allauth's page."""
        name, error = settings.ENV.oidc_name, kwargs.get("error")
        detail = _("The login by %(name)s was cancelled.") % {"name": name}
        if getattr(error, "value", error) != "cancelled":
            detail = _(
                "The login by %(name)s failed. Try again; if it fails again, the server's log has "
                "the cause."
            ) % {"name": name}
            _log(kwargs.get("exception") or request.GET.get("error_description") or error)
        raise ImmediateHttpResponse(login_refused(request, detail, status=400))


def _claims(data: dict[str, Any]) -> dict[str, Any]:
    """The claims of the ID token and of the provider's user information, which come first."""
    parts = [data.get("id_token"), data.get("userinfo")]
    known = [part for part in parts if isinstance(part, dict)]
    return {name: value for part in known for name, value in part.items()} if known else data


def _refused(
    request: HttpRequest, sociallogin: Any, detail: str, groups: list[str]
) -> HttpResponse:
    data = {"subject": sociallogin.account.uid[:150], "groups": groups[:50]}
    services.audit(
        actor=None,
        action="login.refused",
        data=data,
        ip=client_address(request) or None,
    )
    return login_refused(request, detail, status=403)


def _log(cause: object) -> None:
    text = " ".join(str(cause).split())[:300]
    log.warning("Login by OpenID Connect failed: %s", text)
