"""Share links: signed addresses that show one report without a login, for a limited time.

An address is `ID.NONCE.SIGNATURE`: the nonce has 128 random bits, and the signature is an HMAC with
the server's key. A copy of the database does not hold it, and a guess needs both.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.signing import BadSignature, Signer
from django.db import transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import clock, conditional
from orchestrator.common.errors import conflict, forbidden, invalid
from orchestrator.common.units import is_id
from orchestrator.reports import selectors, services
from orchestrator.reports.models import Report, ShareLink

MOST_DAYS: Final = 365
_CLOCKS_DIFFER: Final = timedelta(hours=1)  # a client computes the end by its own clock
USUAL_DAYS: Final = 30
MOST: Final = 50  # active links of a report
_NOTE: Final = 120
_MINUTE: Final = timedelta(minutes=1)


def link_create(
    *, report: Report, by: User, expires: datetime | None = None, note: str = ""
) -> ShareLink:
    """Share a report until `expires`, by default for 30 days. Raises 403, 409, 422."""
    services.require_edit(report, by)
    now, note = clock.now(), " ".join(note.replace("\x00", "").split())
    expires = expires or now + timedelta(days=USUAL_DAYS)
    if not now < expires <= now + timedelta(days=MOST_DAYS) + _CLOCKS_DIFFER:
        message = "the end is in the past or more than a year away"
        raise invalid("expires", message, f"Use a time within {MOST_DAYS} days.")
    if len(note) > _NOTE:
        raise invalid("note", f"longer than {_NOTE} characters", "Write for whom the link is.")
    if report.links.filter(revoked=None, expires__gt=now).count() >= MOST:
        raise conflict(f"The report has {MOST} active links. Revoke one first.")
    with transaction.atomic():
        link = ShareLink.objects.create(
            report=report,
            author=by,
            nonce=secrets.token_hex(16),
            note=note,
            created=now,
            expires=expires,
        )
        data = {"link": link.pk, "expires": expires.isoformat(), "note": note}
        _audit(link, by, "create", data)
    return link


def link_revoke(*, link: ShareLink, by: User) -> ShareLink:
    """End a link at once; a repeated call changes nothing. Raises 403."""
    if link.author_id != by.pk and not selectors.may_edit(link.report, by):
        raise forbidden(f"The link is by {link.author.username}; editors of the report revoke it.")
    with transaction.atomic():
        rows = ShareLink.objects.filter(pk=link.pk, revoked=None)
        if conditional.update(rows, revoked=clock.now()):
            _audit(link, by, "revoke", {"link": link.pk})
    link.refresh_from_db(fields=["revoked"])
    return link


def link_token(link: ShareLink) -> str:
    """The signed part of the link's address.

    The link has its author's rights, so only the author gets it.
    """
    return _signer().sign(f"{link.pk}.{link.nonce}")


def link_by_token(token: str) -> ShareLink | None:
    """The link of a signed text, in whichever state; None for a text that was not signed here."""
    try:
        id, _, nonce = _signer().unsign(token[:200]).partition(".")
    except BadSignature:
        return None
    rows = ShareLink.objects.select_related("author", "report", "report__owner")
    link = rows.filter(pk=int(id)).first() if is_id(id) else None
    if link is None or not secrets.compare_digest(link.nonce, nonce):
        return None
    return link


def link_opened(link: ShareLink) -> None:
    """Record that someone opened it, at most once per minute."""
    now = clock.now()
    if link.last_opened is None or now - link.last_opened >= _MINUTE:
        rows = ShareLink.objects.filter(pk=link.pk, last_opened=link.last_opened)
        conditional.update(rows, last_opened=now)


def link_path(link: ShareLink) -> str:
    """The path of the link's page."""
    return f"/shared/reports/{link_token(link)}/"


def serialize_link(link: ShareLink, user: User) -> dict[str, Any]:
    """The link as REST shows it to a user."""
    return {
        "id": link.pk,
        "author": link.author.username,
        "note": link.note,
        "state": selectors.link_state(link),
        "path": link_path(link) if link.author_id == user.pk else None,
        "created": link.created,
        "expires": link.expires,
        "revoked": link.revoked,
        "last_opened": link.last_opened,
    }


def _signer() -> Signer:
    return Signer(sep=".", salt="orchestrator.reports.share_links")


def _audit(link: ShareLink, by: User, action: str, data: dict[str, object]) -> None:
    accounts.audit(
        actor=by, action=f"report_link.{action}", target=f"report:{link.report_id}", data=data
    )
