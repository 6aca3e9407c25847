"""`Refusal`, the exception of services: what is wrong, with which value, and what to do next.

Its fields are those of RFC 9457 problem details. Does not depend on the API or pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.contracts.base import Problem, as_sentences

PROBLEMS_URL = "https://orrery.dev/problems/"


class Refusal(Exception):
    """A request that a service refuses.

    `type` is a stable slug (`spec-invalid`), `detail` one sentence, and `errors` a list of
    `{field, message, hint}` or of contract `Problem`s. `retry`: the same request may succeed later,
    after `retry_after_s` if set.
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
        self.errors: list[dict[str, str]] = [_error_dict(item) for item in errors]
        self.retry = retry or retry_after_s is not None
        self.retry_after_s = retry_after_s

    @property
    def type_url(self) -> str:
        """The problem type as a URL."""
        return PROBLEMS_URL + self.type

    def problem(self, instance: str = "") -> dict[str, Any]:
        """The problem details as a mapping for `application/problem+json`."""
        details: dict[str, Any] = {
            "type": self.type_url,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if instance:
            details["instance"] = instance
        details["errors"] = self.errors
        if self.retry:
            details["retry"] = True
        return details


def missing_object(what: str, which: object) -> Refusal:
    """404, also for objects that the user may not see."""
    detail = f"There is no {what} {which}, or it belongs to users outside your teams."
    return Refusal("not-found", f"No such {what}", 404, detail)


def forbidden(detail: str) -> Refusal:
    """403: the user's role or ownership does not allow the action."""
    return Refusal("forbidden", "Not allowed", 403, detail)


def conflict(
    detail: str, *, type: str = "conflict", title: str = "Not possible now", retry: bool = False
) -> Refusal:
    """409: the request is valid, but the object's state does not allow it."""
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


def invalid_document(problems: Sequence[Problem]) -> Refusal:
    """422 about the problems of a contract, as `validation_problems` returns them."""
    return Refusal("invalid", "The request is not valid", 422, as_sentences(problems), problems)


def _error_dict(item: Any) -> dict[str, str]:
    if isinstance(item, Mapping):  # version 0.1 wrote `says` and `try`
        return {
            "field": str(item.get("field", "")),
            "message": str(item.get("message", item.get("says", ""))),
            "hint": str(item.get("hint", item.get("try", ""))),
        }
    return {"field": item.field, "message": item.message, "hint": item.hint}
