"""The one way in which services say no: what is wrong, which thing, what to do next, and whether a
retry helps.

Knows the fields of RFC 9457 problem details; does not know HTTP frameworks or pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PROBLEMS_URL = "https://orrery.dev/problems/"


class Refusal(Exception):
    """A request that is not carried out.

    `type` is a stable slug (`spec-invalid`); `detail` a sentence; `errors` a list of `{field, message,
    hint}` (Problems of
    the contracts are accepted); `retry` tells that the same request may succeed later, after
    `retry_after_s` if given.
    """

    def __init__(
        self,
        type: str,
        title: str,
        status: int,
        detail: str = "",
        errors: Iterable[Any] = (),
        retry: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail or title)
        self.type = type
        self.title = title
        self.status = status
        self.detail = detail or title
        self.errors: list[dict[str, str]] = [_plain(item) for item in errors]
        self.retry = retry or retry_after_s is not None
        self.retry_after_s = retry_after_s

    @property
    def type_url(self) -> str:
        return PROBLEMS_URL + self.type

    def problem(self, instance: str = "") -> dict[str, Any]:
        """Problem details as a mapping, ready for `application/problem+json`."""
        found: dict[str, Any] = {
            "type": self.type_url,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if instance:
            found["instance"] = instance
        found["errors"] = self.errors
        if self.retry:
            found["retry"] = True
        return found


def not_found(what: str, which: object) -> Refusal:
    """404, also for what exists but is not the asker's to see."""
    detail = f"There is no {what} {which}, or it belongs to people you share no team with."
    return Refusal("not-found", f"No such {what}", 404, detail)


def forbidden(detail: str) -> Refusal:
    return Refusal("forbidden", "Not allowed", 403, detail)


def conflict(
    detail: str, *, type: str = "conflict", title: str = "Not possible now", retry: bool = False
) -> Refusal:
    """409: the request is right, the thing's state is not."""
    return Refusal(type, title, 409, detail, retry=retry, retry_after_s=1 if retry else None)


def invalid(field: str, message: str, hint: str = "", *, type: str = "invalid") -> Refusal:
    """422 about one field."""
    return Refusal(
        type,
        "The request is not valid",
        422,
        f"{field}: {message}",
        [{"field": field, "message": message, "hint": hint}],
    )


def _plain(item: Any) -> dict[str, str]:
    if isinstance(item, Mapping):
        return {
            "field": str(item.get("field", "")),
            "message": str(item.get("message", item.get("says", ""))),
            "hint": str(item.get("hint", item.get("try", ""))),
        }
    return {"field": item.field, "message": item.message, "hint": item.hint}
