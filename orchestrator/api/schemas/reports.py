"""Schemas of reports, versions, comments and share links."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from ninja import Schema
from pydantic import Field

from orchestrator.api.schemas.base import Id, Time
from workers.contracts.base import Contract

_Version = Annotated[int, Field(ge=1, le=2**31 - 1, description="the newest version that you read")]
_Title = Annotated[str, Field(min_length=1, max_length=160)]
_Text = Annotated[
    str,
    Field(
        max_length=200_000,
        description="Markdown; fenced blocks `panel` and `runs` draw data, `run:12` links a run",
    ),
]
_Note = Annotated[str, Field(max_length=200, description="what changed")]


class NewReport(Contract):
    """A report to create."""

    title: _Title
    text: _Text = ""
    note: _Note = ""


class ReportChange(Contract):
    """A change; omitted fields keep the values of `version`."""

    version: _Version
    title: _Title | None = None
    text: _Text | None = None
    note: _Note = ""


class Restore(Contract):
    """The newest version that you read."""

    version: _Version


class ReportRow(Schema):
    """A report without its text."""

    id: Id
    title: str
    owner: str
    version: int = Field(description="the newest one")
    created: Time
    updated: Time
    open_comments: int


class ReportOut(ReportRow):
    """A report with the text of its newest version."""

    text: str
    author: str = Field(description="of the newest version")
    note: str


class VersionRow(Schema):
    """One saved version, without its text."""

    version: int
    title: str
    note: str
    author: str
    restored: int | None = Field(description="the version that this one repeats")
    created: Time


class VersionOut(VersionRow):
    """One saved version."""

    text: str


class DiffOut(Schema):
    """Two versions compared by line."""

    from_version: int
    to_version: int
    added: int
    removed: int
    diff: str = Field(description="in the unified format; empty for equal texts")


class NewComment(Contract):
    """A comment, or an answer to one."""

    text: Annotated[str, Field(min_length=1, max_length=10_000, description="Markdown")]
    parent: Annotated[
        int | None, Field(ge=1, le=2**63 - 1, description="the comment that it answers")
    ] = None


class CommentChange(Contract):
    """Whether a comment is resolved."""

    resolved: bool


class CommentOut(Schema):
    """A comment, or an answer to `parent`; `version` is what its author read."""

    id: Id
    parent: str | None
    author: str
    version: int
    text: str
    created: Time
    resolved: Time | None
    resolved_by: str | None


class NewLink(Contract):
    """A share link to create."""

    expires: Annotated[
        datetime | None, Field(description="at most a year away; default: in 30 days")
    ] = None
    note: Annotated[str, Field(max_length=120, description="for whom")] = ""


class LinkOut(Schema):
    """A share link. It shows the runs that its author may see, so only the author gets its path."""

    id: Id
    author: str
    note: str
    state: str = Field(description="active, expired, revoked, or disabled: its author lost access")
    path: str | None = Field(description="of the page on this server; null for other people")
    created: Time
    expires: Time
    revoked: Time | None
    last_opened: Time | None
