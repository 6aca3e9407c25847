"""Keyset pagination: `?limit=&cursor=` in, `{items, next_cursor}` out.

A cursor is the key of the last row of a page and the name of its list; other lists refuse it.
"""

from __future__ import annotations

import base64
import binascii
import functools
import inspect
import json
from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from ninja import Query, Schema
from ninja.pagination import PaginationBase, paginate
from pydantic import Field

from orchestrator.api.http.problems import invalid
from orchestrator.api.http.responses import json_response
from workers.contracts.base import Contract

MAX_LIMIT = 200
MAX_BYTES = 8_000_000  # of a page whose rows may be large


class Paging(Contract):
    """The page that a caller requests."""

    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT, description="items per page")] = 50
    cursor: Annotated[
        str | None, Field(description="`next_cursor` of the previous page; empty: first page")
    ] = None


Page = Query[Paging]


class KeysetPagination(PaginationBase):
    """Pages over rows in the order of an integer key.

    A view returns a queryset, whose key is the primary key, or an ordered list of rows. The list
    may
    start after the cursor (`last_key`) and end after `limit + 1` rows: the extra row only shows
    that
    there is a next page.
    """

    # ninja declares nested classes here
    Input = Paging  # type: ignore[assignment]

    class Output(Schema):
        """One page of a list; `next_cursor` is null on the last page."""

        items: list[Any]
        next_cursor: str | None = None

    def __init__(
        self,
        *,
        name: str,
        serialize: Callable[[Any], Any] = lambda row: row,
        serialize_page: Callable[[list[Any]], list[Any]] | None = None,
        key: Callable[[Any], int] = lambda row: int(row.pk),
        newest_first: bool = False,
        size: str = "",
        pass_parameter: str | None = None,
    ) -> None:
        """`size`: the column with a row's bytes; a page ends early at `MAX_BYTES`."""
        super().__init__(pass_parameter=pass_parameter)
        self.name = name
        # all rows of a page at once, if they need common queries
        self.serialize_page = serialize_page or (lambda rows: [serialize(row) for row in rows])
        self.key = key
        self.size = size
        self.newest_first = newest_first

    def paginate_queryset(
        self, queryset: Any, pagination: Any, request: HttpRequest, **params: Any
    ) -> dict[str, Any]:
        """`{items, next_cursor}` of the requested page. 422 for another list's cursor."""
        page: Paging = pagination
        last, limit = last_key(page, self.name), page.limit
        rows = queryset
        if isinstance(rows, QuerySet):
            if last is not None:
                rows = rows.filter(pk__lt=last) if self.newest_first else rows.filter(pk__gt=last)
            limit = self._fitting(rows, limit) if self.size else limit
            rows = rows[: limit + 1]
        elif last is not None:
            sign = -1 if self.newest_first else 1
            rows = [row for row in rows if sign * self.key(row) > sign * last]
        items = list(rows)[: limit + 1]
        more, items = len(items) > limit, items[:limit]
        return {
            "items": self.serialize_page(items),
            "next_cursor": encode_cursor(self.name, self.key(items[-1])) if more else None,
        }

    def _fitting(self, rows: QuerySet[Any], limit: int) -> int:
        """How many of the first rows have at most `MAX_BYTES` together, at least one."""
        sizes = accumulate(rows.values_list(self.size, flat=True)[:limit])
        fitting: int = sum(total <= MAX_BYTES for total in sizes)
        return max(1, fitting)


def paginated(*, as_json: bool = False, **options: Any) -> Callable[..., Callable[..., Any]]:
    """`ninja.pagination.paginate` with keyset cursors; options as for `KeysetPagination`.

    `as_json`: `serialize` returns what the schema describes, as JSON data. The page is then sent
    as it is; validating 50 runs again takes as long as reading them.
    """

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        # ninja resolves annotations in the wrapper's module, so resolve them here
        view.__signature__ = inspect.signature(view, eval_str=True)  # type: ignore[attr-defined]
        decorated: Callable[..., Any] = paginate(KeysetPagination, **options)(view)
        if not as_json:
            return decorated

        @functools.wraps(decorated)
        def answer(request: HttpRequest, **arguments: Any) -> HttpResponse:
            return json_response(decorated(request, **arguments))

        return answer

    return decorate


def last_key(page: Paging, name: str) -> int | None:
    """The key that the cursor holds; None on the first page. 422 for another list's cursor."""
    if not page.cursor:
        return None
    key = _decoded(page.cursor, name)
    if isinstance(key, int) and not isinstance(key, bool) and abs(key) < 2**63:
        return key
    raise _not_a_cursor(page.cursor)


def last_text(page: Paging, name: str) -> str:
    """The text that the cursor holds; empty on the first page. 422 for another list's cursor."""
    if not page.cursor:
        return ""
    key = _decoded(page.cursor, name)
    if isinstance(key, str):
        return key
    raise _not_a_cursor(page.cursor)


def _decoded(cursor: str, name: str) -> Any:
    """The key of a cursor of this list; None for another list's and for other texts."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        list_name, key = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError):
        return None
    return key if list_name == name else None


def _not_a_cursor(cursor: str) -> Exception:
    return invalid(
        "cursor",
        f"{cursor[:40]!r} is not a cursor of this list",
        "Use the next_cursor of the previous page.",
    )


def encode_cursor(name: str, key: int | str) -> str:
    """The cursor after the row with this key."""
    return base64.urlsafe_b64encode(json.dumps([name, key]).encode()).rstrip(b"=").decode()
