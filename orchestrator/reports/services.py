"""Creates, changes, restores and deletes reports. A change names the version that it is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.db import IntegrityError, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts import teams
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, forbidden, invalid
from orchestrator.common.units import iso
from orchestrator.reports import block_data, differences, selectors
from orchestrator.reports.blocks import check_blocks
from orchestrator.reports.models import Report, ReportVersion

MOST_TITLE: Final = 160
MOST_TEXT: Final = 200_000
MOST_NOTE: Final = 200


class VersionConflict(Refusal):
    """409: someone saved a version after the one that a change is of.

    Holds both: the newest version, and what was submitted. `merged` is the text with both changes,
    if they are in different places.
    """

    def __init__(
        self, *, current: ReportVersion, base: ReportVersion, title: str, text: str
    ) -> None:
        who = current.author.username
        super().__init__(
            "version-conflict",
            "The report was changed meanwhile",
            409,
            f"{who} saved version {current.number} after version {base.number}, which your change "
            "is of. Nothing is overwritten: compare both, then save again from version "
            f"{current.number}.",
        )
        self.current, self.base = current, base
        self.submitted_title, self.submitted_text = title, text
        self.merged = differences.merged(base.text, current.text, text)

    def problem(self, instance: str = "") -> dict[str, Any]:
        """The problem details with `current`, `submitted`, `diff` and `merged`."""
        current = selectors.serialize_version(self.current)
        return super().problem(instance) | {
            "current": {**current, "created": iso(self.current.created)},
            "submitted": {
                "version": self.base.number,
                "title": self.submitted_title,
                "text": self.submitted_text,
            },
            "diff": differences.unified(
                self.current.text,
                self.submitted_text,
                f"version {self.current.number}",
                "submitted",
            ),
            "merged": self.merged,
        }


def report_create(*, owner: User, title: str, text: str = "", note: str = "") -> Report:
    """Create a report with its first version. Raises 403 for viewers, 422."""
    accounts.require_role(owner, Role.SUBMITTER, "write reports")
    title, text, note = _checked(title, text, note)
    blocks = check_blocks(text)
    block_data.check(blocks)
    now = clock.now()
    with transaction.atomic():
        report = Report.objects.create(title=title, owner=owner, created=now, updated=now)
        report.versions.create(
            number=1, title=title, text=text, note=note, author=owner, created=now
        )
        block_data.freeze(report=report, blocks=blocks, by=owner)
        _audit(report, owner, "create", {"title": title})
    return report


def report_update(
    *,
    report: Report,
    by: User,
    version: int,
    title: str | None = None,
    text: str | None = None,
    note: str = "",
) -> Report:
    """Save a new version of what the person changed in `version`; None leaves a field alone.

    Raises 403, 404 for an unknown version, 409 `VersionConflict` if `version` is not the newest
    one, 422. Without a change nothing is saved.
    """
    _require_edit(report, by)
    base = selectors.version_get(report=report, number=version)
    new_title, new_text, note = _checked(
        base.title if title is None else title, base.text if text is None else text, note
    )
    _require_newest(report, base, new_title, new_text)
    if (new_title, new_text) == (base.title, base.text):
        return report
    blocks = check_blocks(new_text)
    block_data.check(blocks)
    return _saved(report, base, by, title=new_title, text=new_text, note=note, blocks=blocks)


def report_restore(*, report: Report, by: User, number: int, version: int) -> Report:
    """Save an old version as the newest one; `version` is the newest that the person saw.

    Raises 403, 404 and 409 like `report_update`. Frozen panels show their data of then.
    """
    _require_edit(report, by)
    old = selectors.version_get(report=report, number=number)
    base = selectors.version_get(report=report, number=version)
    _require_newest(report, base, old.title, old.text)
    if number == version:
        raise invalid("version", f"version {number} is the newest one", "Choose an older version.")
    return _saved(report, base, by, title=old.title, text=old.text, restored=number)


def may_delete(report: Report, user: User) -> bool:
    """Whether the user may delete it: its owner, operators, and those of a shared team."""
    return teams.manages(user, report.owner_id)


def report_delete(*, report: Report, by: User) -> None:
    """Delete a report with its versions, comments and links. Raises 403."""
    if not may_delete(report, by):
        raise forbidden(
            f"{report.title!r} belongs to {report.owner.username}; its owner and operators can "
            "delete it."
        )
    with transaction.atomic():
        _audit(report, by, "delete", {"title": report.title, "versions": report.head})
        report.delete()


def require_edit(report: Report, by: User) -> None:
    """Raise 403 unless the user may edit the report."""
    _require_edit(report, by)


def _saved(
    report: Report,
    base: ReportVersion,
    by: User,
    *,
    title: str,
    text: str,
    note: str = "",
    restored: int | None = None,
    blocks: Sequence[Any] = (),
) -> Report:
    now, number = clock.now(), base.number + 1
    try:
        with transaction.atomic():
            rows = Report.objects.filter(pk=report.pk, head=base.number)
            if not conditional.update(rows, head=number, title=title, updated=now):
                raise _conflict(report, base, title, text)
            report.versions.create(
                number=number,
                title=title,
                text=text,
                note=note,
                author=by,
                restored=restored,
                created=now,
            )
            block_data.freeze(report=report, blocks=blocks, by=by)
            data = {"version": number} | ({"restored": restored} if restored else {})
            _audit(report, by, "restore" if restored else "update", data)
    except IntegrityError:  # another transaction saved the same number
        raise _conflict(report, base, title, text) from None
    report.refresh_from_db(fields=["head", "title", "updated"])
    return report


def _require_newest(report: Report, base: ReportVersion, title: str, text: str) -> None:
    """Raise VersionConflict before work is done; `_saved` decides."""
    report.refresh_from_db(fields=["head", "title", "updated"])
    if base.number != report.head:
        raise _conflict(report, base, title, text)


def _conflict(report: Report, base: ReportVersion, title: str, text: str) -> VersionConflict:
    report.refresh_from_db(fields=["head", "title", "updated"])
    current = selectors.version_get(report=report)
    return VersionConflict(current=current, base=base, title=title, text=text)


def _require_edit(report: Report, by: User) -> None:
    if not selectors.may_edit(report, by):
        raise forbidden(
            f"{report.title!r} belongs to {report.owner.username}; submitters of a shared team "
            f"can edit it. {by.username} may read it."
        )


def _checked(title: str, text: str, note: str) -> tuple[str, str, str]:
    """The fields as they are stored. Raises 422."""
    title, note = " ".join(title.split()), " ".join(note.replace("\x00", "").split())
    if not 1 <= len(title) <= MOST_TITLE or not title.isprintable():
        message = f"a title has 1 to {MOST_TITLE} printable characters"
        raise invalid("title", message, "Name the report after what it answers.")
    text = text.replace("\r\n", "\n").replace("\x00", "\ufffd").strip("\n")
    if len(text) > MOST_TEXT:
        message = f"the text has {len(text):,} characters, more than {MOST_TEXT:,}"
        raise invalid("text", message, "Write a second report.")
    if len(note) > MOST_NOTE:
        raise invalid(
            "note", f"longer than {MOST_NOTE} characters", "Write what changed in a few words."
        )
    return title, text, note


def _audit(report: Report, by: User, action: str, data: dict[str, Any]) -> None:
    accounts.audit(actor=by, action=f"report.{action}", target=f"report:{report.pk}", data=data)
