"""The list of nodes on the fleet page: search, pool, problems, free devices, and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from django.core.paginator import Paginator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.fleet.selectors import NodeFacts

NODES: Final = 25  # per page; a row with eight devices takes 1 ms of CPU time
SHOW: Final = {
    "": gettext_noop("all"),
    "problems": gettext_noop("problems"),
    "free": gettext_noop("free devices"),
}


@dataclass(frozen=True)
class NodeFilters:
    """The filters of a URL; unknown values are ignored."""

    q: str = ""
    pool: str = ""
    show: str = ""
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> NodeFilters:
        """From the URL's query."""
        show, page = query.get("show", ""), query.get("page", "1")
        return cls(
            query.get("q", "").strip(),
            query.get("pool", ""),
            show if show in SHOW else "",
            int(page) if page.isdecimal() and len(page) < 7 else 1,
        )

    def url(self, window: str = "", **changed: Any) -> str:
        """The query with these filters changed; another filter than `page` shows page 1."""
        values: dict[str, Any] = {"q": self.q, "pool": self.pool, "show": self.show, "page": 1}
        values |= changed
        values["page"] = "" if values["page"] == 1 else values["page"]
        query = {name: value for name, value in (values | {"window": window}).items() if value}
        return f"?{urlencode(query)}"


@dataclass(frozen=True)
class NodeList:
    """One page of the nodes that match."""

    nodes: list[NodeFacts]
    matching: int
    filters: NodeFilters
    pages: int
    chips: list[dict[str, Any]]
    newer: str  # URL of the page before, or ""
    older: str
    # a short list without filters needs no controls
    controls: bool
    filtered: bool


def select(
    facts: Sequence[NodeFacts],
    filters: NodeFilters,
    held: Mapping[int, Iterable[Any]],
    window: str,
) -> NodeList:
    """The page that the filters name; `held` as `scheduling.held_by_node`."""
    matches = [node for node in facts if filters.q.lower() in node.name.lower()]
    if filters.pool:
        matches = [node for node in matches if node.pool == filters.pool]
    free = {node.id for node in matches if _has_free_devices(node, held)}
    sets = {
        "": matches,
        "problems": [node for node in matches if node.in_trouble],
        "free": [node for node in matches if node.id in free],
    }
    chips = [
        {
            "label": _(SHOW[name]),
            "count": len(nodes),
            "on": name == filters.show,
            "url": filters.url(window, show=name),
        }
        for name, nodes in sets.items()
    ]
    pages = Paginator(sets[filters.show], NODES)
    page = pages.get_page(filters.page)
    number = page.number
    return NodeList(
        nodes=list(page.object_list),
        matching=len(sets[filters.show]),
        filters=NodeFilters(filters.q, filters.pool, filters.show, number),
        pages=pages.num_pages,
        chips=chips,
        newer=filters.url(window, page=number - 1) if page.has_previous() else "",
        older=filters.url(window, page=number + 1) if page.has_next() else "",
        controls=len(facts) > NODES or filters != NodeFilters(),
        filtered=bool(filters.q or filters.pool or filters.show),
    )


def _has_free_devices(node: NodeFacts, held: Mapping[int, Iterable[Any]]) -> bool:
    busy = sum(share.devices for share in held.get(node.id, ()))
    closed = node.health != "up" or node.drained or node.cordoned or node.skew == "refused"
    return not closed and node.devices - node.unusable > busy
