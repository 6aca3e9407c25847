"""Reads people, tokens and audit entries, and tells whose things a person may see."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q, QuerySet

from orchestrator.accounts.models import ApiToken, AuditEntry, Team, User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.accounts.services import TOKEN_PREFIX, token_digest
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, not_found
from orchestrator.common.units import is_id, iso

_USED_EVERY = timedelta(minutes=1)


def token_check(text: str) -> tuple[User, ApiToken]:
    """The user and token of a bearer text. Raises 401 that tells an unknown from an expired or
    revoked token.

    Notes the use at most once a minute, so that reading costs no write each time.
    """
    now = clock.now()
    token = None
    if text.startswith(TOKEN_PREFIX):
        token = ApiToken.objects.select_related("user").filter(digest=token_digest(text)).first()
    if token is None:
        raise _unauthorized(
            "token-unknown", "This token is not known here. Check that it was copied whole."
        )
    if token.revoked is not None:
        raise _unauthorized(
            "token-revoked", f"The token {token.name!r} was revoked {iso(token.revoked)}. Make one."
        )
    if token.expires is not None and token.expires <= now:
        raise _unauthorized(
            "token-expired", f"The token {token.name!r} expired {iso(token.expires)}. Make another."
        )
    if not token.user.is_active:
        raise _unauthorized(
            "user-inactive", f"The account {token.user.username} is switched off. Ask an admin."
        )
    if token.last_used is None or now - token.last_used >= _USED_EVERY:
        conditional.move(
            ApiToken.objects.filter(pk=token.pk, last_used=token.last_used), last_used=now
        )
        token.last_used = now
    return token.user, token


def token_user(text: str) -> tuple[User, ApiToken] | None:
    """As `token_check`, None where that refuses."""
    try:
        return token_check(text)
    except Refusal:
        return None


def tokens_of(*, user: User) -> QuerySet[ApiToken]:
    """The person's own tokens that are not revoked, newest first."""
    return ApiToken.objects.filter(user=user, revoked=None).order_by("-id")


def token_get(*, user: User, id: int | str) -> ApiToken:
    """A token that this person may revoke: an own one, or for admins any. Raises 404."""
    if is_id(id):
        found = ApiToken.objects.filter(pk=int(id))
        token = (found if at_least(user.role, Role.ADMIN) else found.filter(user=user)).first()
        if token is not None:
            return token
    raise not_found("token", id)


def audit_entries(*, user: User) -> QuerySet[AuditEntry]:
    """Newest first: admins see all, everybody else what they did themselves."""
    entries = AuditEntry.objects.order_by("-id")
    return entries if at_least(user.role, Role.ADMIN) else entries.filter(actor=user)


def user_get(username: str) -> User | None:
    return User.objects.filter(username=username).first()


def sees_everyone(user: User) -> bool:
    return at_least(user.role, Role.OPERATOR) or user.is_superuser


def visible_owners(user: User) -> list[int] | None:
    """Ids of the people whose runs this one may see: oneself and everybody of one's teams; None
    means everybody.
    """
    if sees_everyone(user):
        return None
    mine = Team.objects.filter(members=user)
    return sorted({user.pk, *User.objects.filter(teams__in=mine).values_list("id", flat=True)})


def people_visible_to(*, user: User) -> QuerySet[User]:
    """For filters by owner: oneself and team mates, for operators everybody."""
    owners = visible_owners(user)
    everybody = User.objects.order_by("username")
    return everybody if owners is None else everybody.filter(Q(pk__in=owners))


def _unauthorized(type: str, detail: str) -> Refusal:
    return Refusal(type, "Not authenticated", 401, detail)
