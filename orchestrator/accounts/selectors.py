"""Reads users, tokens and audit entries; decides whose objects a user may see."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q, QuerySet

from orchestrator.accounts.models import ApiToken, AuditEntry, Team, User
from orchestrator.accounts.roles import SCOPES, Role, at_least, scopes_of
from orchestrator.accounts.services import TOKEN_PREFIX, token_digest
from orchestrator.common import clock, conditional
from orchestrator.common.compiled_query import CompiledQuery
from orchestrator.common.errors import Refusal, missing_object
from orchestrator.common.units import is_id, iso

_LAST_USED_INTERVAL = timedelta(minutes=1)
_token_by_digest = CompiledQuery(
    lambda digest: ApiToken.objects.select_related("user").filter(digest=digest), str
)


def token_check(text: str) -> tuple[User, ApiToken]:
    """The user and token of a bearer text.

    Raises 401 with different types for unknown, revoked and expired tokens. Records the last use
    at most once per minute, to avoid a write per request.
    """
    now = clock.now()
    token = None
    if text.startswith(TOKEN_PREFIX):
        token = _token_by_digest.first(token_digest(text))
    if token is None:
        raise _unauthorized(
            "token-unknown", "This token does not exist. Check that it was copied completely."
        )
    if token.revoked is not None:
        raise _unauthorized(
            "token-revoked",
            f"The token {token.name!r} was revoked {iso(token.revoked)}. Create a new one.",
        )
    if token.expires is not None and token.expires <= now:
        raise _unauthorized(
            "token-expired",
            f"The token {token.name!r} expired {iso(token.expires)}. Create a new one.",
        )
    if not token.user.is_active:
        raise _unauthorized(
            "user-inactive", f"The account {token.user.username} is disabled. Ask an admin."
        )
    if token.last_used is None or now - token.last_used >= _LAST_USED_INTERVAL:
        conditional.update(
            ApiToken.objects.filter(pk=token.pk, last_used=token.last_used), last_used=now
        )
        token.last_used = now
    return token.user, token


def token_user(text: str) -> tuple[User, ApiToken] | None:
    """`token_check`, but None for an invalid token."""
    try:
        return token_check(text)
    except Refusal:
        return None


def allowed_scopes(user: User) -> frozenset[str]:
    """The scopes that the user's role allows."""
    return frozenset(SCOPES if user.is_superuser else scopes_of(user.role))


def token_scopes(user: User, token: ApiToken) -> frozenset[str]:
    """The token's scopes that its user's role still allows."""
    return frozenset(token.scopes) & allowed_scopes(user)


def tokens_of(*, user: User) -> QuerySet[ApiToken]:
    """The user's tokens that are not revoked, newest first."""
    return ApiToken.objects.filter(user=user, revoked=None).order_by("-id")


def token_get(*, user: User, id: int | str) -> ApiToken:
    """A token that the user may revoke: their own, or for admins any. Raises 404."""
    if is_id(id):
        tokens = ApiToken.objects.filter(pk=int(id))
        token = (tokens if at_least(user.role, Role.ADMIN) else tokens.filter(user=user)).first()
        if token is not None:
            return token
    raise missing_object("token", id)


def audit_entries(*, user: User) -> QuerySet[AuditEntry]:
    """Audit entries, newest first: all for admins, their own for other users."""
    entries = AuditEntry.objects.order_by("-id")
    return entries if at_least(user.role, Role.ADMIN) else entries.filter(actor=user)


def user_get(username: str) -> User | None:
    """The user with this name."""
    return User.objects.filter(username=username).first()


def sees_everyone(user: User) -> bool:
    """Whether the user sees the objects of all users."""
    return at_least(user.role, Role.OPERATOR) or user.is_superuser


def visible_owners(user: User) -> list[int] | None:
    """Ids of the users whose runs the user may see: their own and those of their teams.

    None: all users.
    """
    if sees_everyone(user):
        return None
    teams = Team.objects.filter(members=user)
    return sorted({user.pk, *User.objects.filter(teams__in=teams).values_list("id", flat=True)})


def people_visible_to(*, user: User) -> QuerySet[User]:
    """For filters by owner: the user and team members, for operators all users."""
    owners = visible_owners(user)
    users = User.objects.order_by("username")
    return users if owners is None else users.filter(Q(pk__in=owners))


def people_all() -> QuerySet[User]:
    """All active users, by name; for admins of teams, who add members."""
    return User.objects.filter(is_active=True).order_by("username")


def _unauthorized(type: str, detail: str) -> Refusal:
    return Refusal(type, "Not authenticated", 401, detail)


def team_names(users: set[int]) -> dict[int, list[str]]:
    """The names of each user's teams, sorted; users without a team are left out."""
    names: dict[int, list[str]] = {}
    pairs = Team.objects.filter(members__in=users).values_list("members", "name").order_by("name")
    for user, name in pairs:
        if user in users:
            names.setdefault(user, []).append(name)
    return names
