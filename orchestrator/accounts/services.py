"""Creates and changes users, tokens and audit entries; checks roles."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from orchestrator.accounts.idempotency import (
    idempotent_abandon,
    idempotent_begin,
    idempotent_finish,
    idempotent_purge,
)
from orchestrator.accounts.models import ApiToken, AuditEntry, User
from orchestrator.accounts.roles import SCOPES, Role, at_least, scopes_of
from orchestrator.common import clock, conditional
from orchestrator.common.errors import conflict, forbidden, invalid
from orchestrator.common.units import iso

__all__ = [
    "audit",
    "idempotent_abandon",
    "idempotent_begin",
    "idempotent_finish",
    "idempotent_purge",
    "password_change",
    "require_role",
    "token_create",
    "token_digest",
    "token_revoke",
    "user_create",
    "user_role_set",
]

TOKEN_PREFIX = "orr_"
MAX_TOKENS = 100


def user_create(
    *,
    username: str,
    password: str | None = None,
    role: str = Role.SUBMITTER,
    email: str = "",
    must_change_password: bool = False,
    by: User | None = None,
) -> User:
    """Create a user. Without a password the user can only use tokens; admins get Django's admin.

    Raises 403 if `by` is not an admin, 409 for a name that is taken, 422.
    """
    if role not in Role.values:
        raise invalid("role", f"{role!r} is not a role", f"Use one of {', '.join(Role.values)}.")
    if by is not None:
        require_role(by, Role.ADMIN, "create users")
    try:
        User.username_validator(username)
    except ValidationError as error:
        raise invalid(
            "username", " ".join(error.messages), "Use letters, digits and @.+-_."
        ) from None
    user = User(
        username=username, email=email, role=role, must_change_password=must_change_password
    )
    user.is_staff = user.is_superuser = role == Role.ADMIN
    user.set_password(password)
    try:
        with transaction.atomic():
            user.save()
            audit(
                actor=by,
                action="user.create",
                target=f"user:{user.pk}",
                data={"username": username, "role": role},
            )
    except IntegrityError:
        raise conflict(
            f"There is already a user {username}. Choose another name.", type="name-taken"
        ) from None
    return user


def user_role_set(*, user: User, role: str, by: User | None) -> None:
    """Set the role; at their next use, tokens lose scopes that it does not allow.

    Raises 403 if `by` is not an admin, 409 if admins would remove their own role, 422.
    """
    if by is not None:
        require_role(by, Role.ADMIN, "change roles")
    if role not in Role.values:
        raise invalid("role", f"{role!r} is not a role", f"Use one of {', '.join(Role.values)}.")
    if by is not None and user.pk == by.pk and role != Role.ADMIN:
        raise conflict(
            "You cannot remove your own admin role. Ask another admin.", type="last-admin"
        )
    with transaction.atomic():
        old, user.role = user.role, role
        user.is_staff = user.is_superuser = role == Role.ADMIN
        user.save(update_fields=["role", "is_staff", "is_superuser"])
        audit(
            actor=by, action="user.role", target=f"user:{user.pk}", data={"old": old, "new": role}
        )


def password_change(*, user: User, password: str) -> None:
    """Set a new password; the user need not change it again. Raises 422 by the site's rules."""
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise invalid(
            "password", " ".join(error.messages), "Choose a longer, less common password."
        ) from None
    with transaction.atomic():
        user.set_password(password)
        user.must_change_password = False
        user.save(update_fields=["password", "must_change_password"])
        audit(actor=user, action="user.password", target=f"user:{user.pk}")


def require_role(user: User, role: Role, doing: str) -> None:
    """Raise 403 unless the user has at least that role. `doing` completes "is required to …"."""
    if not at_least(user.role, role) and not user.is_superuser:
        raise forbidden(
            f"The role {role.value} is required to {doing}; {user.username} is {user.role}. Ask an "
            "admin."
        )


def token_create(
    *,
    user: User,
    name: str,
    scopes: Iterable[str] | None = None,
    expires: datetime | None = None,
    by: User | None,
    creator: ApiToken | None = None,
) -> tuple[ApiToken, str]:
    """Create a token: `(token, text)`; the text cannot be shown again.

    `scopes` defaults to all that the user's role allows. Users create tokens for themselves; admins
    and local commands (`by` None) for every user. `creator` is the token of the call: the new one
    expires no later; without `expires` at the same time. Raises 409 for too many tokens, 422.
    """
    if by is not None and by.pk != user.pk:
        require_role(by, Role.ADMIN, "create tokens for other users")
    name = name.strip()
    if not 1 <= len(name) <= 80:
        raise invalid(
            "name",
            "a token's name has 1 to 80 characters",
            "Enter a name that shows where the token is used, such as laptop.",
        )
    allowed = scopes_of(user.role)
    wanted = allowed if scopes is None else list(dict.fromkeys(scopes))
    for scope in wanted:
        if scope not in SCOPES:
            raise invalid(
                "scopes", f"{scope!r} is not a scope", f"Use one of {', '.join(allowed)}."
            )
        if scope not in allowed:
            raise invalid(
                "scopes",
                f"The scope {scope} requires the role {SCOPES[scope].value}; {user.username} has "
                "the "
                f"role {user.role}",
                f"Use one of {', '.join(allowed)}.",
                type="scope-not-allowed",
            )
    if expires is not None and expires <= clock.now():
        raise invalid("expires", "the time is in the past", "Use a later time, or omit the field.")
    if creator is not None and creator.expires is not None:
        expires = expires or creator.expires
        if expires > creator.expires:
            raise invalid(
                "expires",
                f"a token cannot outlive its creator, which expires {iso(creator.expires)}",
                "Use that time or an earlier one.",
                type="expiry-not-allowed",
            )
    if ApiToken.objects.filter(user=user, revoked=None).count() >= MAX_TOKENS:
        raise conflict(
            f"{user.username} has {MAX_TOKENS} tokens. Revoke one first.", type="too-many-tokens"
        )
    text = TOKEN_PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        token = ApiToken.objects.create(
            user=user,
            name=name,
            prefix=text[:12],
            digest=token_digest(text),
            scopes=wanted,
            created=clock.now(),
            expires=expires,
        )
        data = {"name": name, "user": user.username, "scopes": wanted}
        audit(actor=by, action="token.create", target=f"token:{token.pk}", data=data)
    return token, text


def token_revoke(*, token: ApiToken, by: User) -> None:
    """Revoke the token at once. Idempotent."""
    if token.user_id != by.pk:
        require_role(by, Role.ADMIN, "revoke tokens of other users")
    with transaction.atomic():
        if conditional.update(
            ApiToken.objects.filter(pk=token.pk, revoked=None), revoked=clock.now()
        ):
            audit(
                actor=by,
                action="token.revoke",
                target=f"token:{token.pk}",
                data={"name": token.name},
            )
    token.refresh_from_db(fields=["revoked"])


def token_digest(text: str) -> str:
    """The SHA-256 of the text; enough, because the text has 256 random bits."""
    return hashlib.sha256(text.encode()).hexdigest()


def audit(
    *,
    actor: User | None,
    action: str,
    target: str = "",
    data: Mapping[str, Any] | None = None,
    ip: str | None = None,
) -> AuditEntry:
    """Append an audit entry in the caller's transaction. No actor: the system."""
    return AuditEntry.objects.create(
        time=clock.now(),
        actor=actor,
        actor_name=actor.username if actor else "system",
        action=action,
        target=target,
        data=dict(data or {}),
        ip=ip,
    )
