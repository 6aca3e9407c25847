"""Keyset paging: `?limit=&cursor=` in, `{items, next_cursor}` out. A cursor says after which key a
list goes on.

Does not know what the keys mean; a cursor names its list, so that one list's cursor is refused by
another.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from django.db.models import QuerySet
from ninja import Query
from pydantic import Field

from orchestrator.api.http.problems import invalid
from workers.contracts.base import Contract

MAX_LIMIT = 200


class Paging(Contract):
    """Where in a list, and how much of it."""

    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT, description="items a page")] = 50
    cursor: Annotated[str | None, Field(description="`next_cursor` of the page before")] = None


Page = Query[Paging]


def after(page: Paging, name: str) -> int | None:
    """The key that the cursor holds, None on the first page; 422 for a cursor that this list did
    not make.
    """
    if page.cursor is None or page.cursor == "":
        return None
    try:
        padded = page.cursor + "=" * (-len(page.cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        of, key = found
    except (binascii.Error, ValueError, TypeError):
        of, key = None, None
    if of != name or not isinstance(key, int) or isinstance(key, bool) or abs(key) >= 2**63:
        raise invalid(
            "cursor",
            f"{page.cursor[:40]!r} is not a cursor of this list",
            "the next_cursor of the page before",
        )
    return key


def cursor(name: str, key: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([name, key]).encode()).rstrip(b"=").decode()


def paged(
    rows: Iterable[Any],
    page: Paging,
    name: str,
    key: Callable[[Any], int],
    shape: Callable[[Any], Any],
) -> dict[str, Any]:
    """`rows` holds up to `limit + 1` rows in order: the one too many only tells that there is a
    next page.
    """
    items = list(rows)
    more = len(items) > page.limit
    items = items[: page.limit]
    return {
        "items": [shape(row) for row in items],
        "next_cursor": cursor(name, key(items[-1])) if more and items else None,
    }


def paged_query(
    rows: QuerySet[Any],
    page: Paging,
    name: str,
    shape: Callable[[Any], Any],
    *,
    newest_first: bool = False,
) -> dict[str, Any]:
    """The same over a query in the order of its primary key, ascending or `newest_first`."""
    last = after(page, name)
    if last is not None:
        rows = rows.filter(pk__lt=last) if newest_first else rows.filter(pk__gt=last)
    return paged(rows[: page.limit + 1], page, name, lambda row: row.pk, shape)


def paged_whole(
    rows: Iterable[Any],
    page: Paging,
    name: str,
    key: Callable[[Any], int],
    shape: Callable[[Any], Any],
) -> dict[str, Any]:
    """The same over a short list that was read whole: its keys ascend or descend, the cursor's own
    key is skipped.
    """
    rows = list(rows)
    last = after(page, name)
    if last is not None:
        descending = len(rows) > 1 and key(rows[0]) > key(rows[-1])
        rows = [row for row in rows if (key(row) < last if descending else key(row) > last)]
    return paged(rows[: page.limit + 1], page, name, key, shape)
