"""Errors of commands, and how they are shown: what is wrong, where, and what to do."""

from __future__ import annotations

import json
import sys
from typing import Any

REFUSED = 1
USAGE = 2
CANCELLED = 3
AUTHENTICATION = 401  # status of a refusal: the token is missing, unknown or expired

_LOGIN = "log in with `orrery login`, or set ORRERY_TOKEN."
# what to do about a problem's type (last part of its URL)
_HINTS = {
    "not-authenticated": f"L{_LOGIN[1:]}",
    "token-expired": f"Create a new token on the page Tokens, then {_LOGIN}",
    "token-revoked": f"Create a new token on the page Tokens, then {_LOGIN}",
    "token-unknown": f"Check that the token belongs to this server, then {_LOGIN}",
    "scope-missing": "Create a token with the missing scope on the page Tokens.",
}


class CliError(Exception):
    """A message for the user, with what to do next, and the exit code."""

    def __init__(self, message: str, hint: str = "", *, code: int = REFUSED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code

    def problem(self) -> dict[str, Any]:
        """The error as problem details (RFC 9457)."""
        return {"title": self.message, "detail": self.message, "hint": self.hint}


class Unreachable(CliError):
    """The server does not answer, or cannot answer now: trying again may help.

    `after_s`: the wait that the server requests. `sent`: it may have executed the request.
    """

    def __init__(
        self, message: str, hint: str = "", *, after_s: float | None = None, sent: bool = False
    ) -> None:
        super().__init__(message, hint)
        self.after_s = after_s
        self.sent = sent


class Refused(CliError):
    """The server refused the request, with problem details."""

    def __init__(self, document: dict[str, Any], status: int) -> None:
        self.document = document
        self.status = status
        self.slug = str(document.get("type", "")).rpartition("/")[2]
        title, detail = str(document.get("title", "")), str(document.get("detail", ""))
        super().__init__(f"{title}: {detail}" if title and detail else title or detail)
        self.hint = _HINTS.get(self.slug, "")

    def problem(self) -> dict[str, Any]:
        """The problem details of the server."""
        return {**self.document, **({"hint": self.hint} if self.hint else {})}


def report(error: CliError, *, as_json: bool) -> None:
    """Write the error to standard error: as text, or as one JSON document."""
    if as_json:
        print(json.dumps(error.problem()), file=sys.stderr)
        return
    fields = error.document.get("errors") or [] if isinstance(error, Refused) else []
    if fields and isinstance(error, Refused):
        print(f"error: {error.document.get('title', error.message)}", file=sys.stderr)
    else:
        print(f"error: {error.message}", file=sys.stderr)
    for field in fields:
        print(f"  {field.get('field', '')}: {field.get('message', '')}", file=sys.stderr)
        if field.get("hint"):
            print(f"    hint: {field['hint']}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
