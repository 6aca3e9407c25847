"""Filters of the runs list in the URL, and the chips that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.utils.translation import gettext as _

from workers.contracts.specs.run import KINDS
from workers.contracts.wire.node_messages import RunState

FILTERS = ("state", "kind", "experiment", "tag", "owner", "q", "query")
NAMES = (*FILTERS, "sort", "columns", "group", "pin", "widths")
_LONGEST = {"query": 2000, "columns": 4000, "pin": 1000, "widths": 2000}
LIVE_STATES = ("queued", "starting", "running", "stopping", "paused")


@dataclass(frozen=True)
class Chip:
    """A filter: `on` if active, `url` is the list with it toggled."""

    label: str
    url: str
    on: bool = False
    count: int | None = None
    state: str = ""


@dataclass(frozen=True)
class RunFilters:
    """Filter values; empty means all. `state` and `kind` may list several, separated by commas."""

    state: str = ""
    kind: str = ""
    experiment: str = ""
    tag: str = ""
    owner: str = ""
    q: str = ""
    query: str = ""
    sort: str = ""
    columns: str = ""
    group: str = ""
    pin: str = ""
    widths: str = ""  # of columns: key:pixels,…
    before: int | None = None
    after: str = ""  # the cursor of a page in an order

    @classmethod
    def read(cls, query: Mapping[str, Any]) -> RunFilters:
        """Read a query; unknown states and kinds and a wrong cursor are ignored."""
        values = {
            name: str(query.get(name, "")).strip()[: _LONGEST.get(name, 200)] for name in NAMES
        }
        values["state"] = ",".join(
            state for state in _split(values["state"]) if state in set(RunState)
        )
        values["kind"] = ",".join(kind for kind in _split(values["kind"]) if kind in KINDS)
        before = str(query.get("before", ""))
        return cls(
            **values,
            before=int(before) if before.isdecimal() and len(before) < 19 else None,
            after=str(query.get("after", ""))[:1000],
        )

    @property
    def active(self) -> dict[str, str]:
        """The non-empty filters."""
        return {name: value for name in FILTERS if (value := getattr(self, name))}

    @property
    def view(self) -> dict[str, str]:
        """The non-empty filters, order, columns and groups."""
        return {name: value for name in NAMES if (value := getattr(self, name))}

    def url(self, **changes: Any) -> str:
        """Return the list's URL with changes, from its first row unless `before` is given."""
        query = {**self.view, **changes}
        text = urlencode({name: value for name, value in query.items() if value not in ("", None)})
        return f"?{text}" if text else "?"

    def state_chips(self, counts: Mapping[str, int]) -> list[Chip]:
        """Return one chip per state that has runs or is selected, in lifecycle order."""
        chosen = _split(self.state)
        return [
            Chip(
                _(state),
                self.url(state=_toggled(chosen, state)),
                state in chosen,
                counts.get(state, 0),
                state,
            )
            for state in RunState
            if counts.get(state) or state in chosen
        ]

    def active_chips(self) -> list[Chip]:
        """Return the active filters other than states; each chip's URL removes it."""
        labels = {
            "q": "“{}”",
            "tag": _("tag: {}"),
            "owner": _("owner: {}"),
            "experiment": _("experiment: {}"),
            "kind": "{}",
        }
        return [
            Chip(labels[name].format(value), self.url(**{name: ""}), True)
            for name, value in self.active.items()
            if name not in ("state", "query")
        ]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _toggled(chosen: list[str], value: str) -> str:
    return ",".join(
        [*chosen, value] if value not in chosen else [item for item in chosen if item != value]
    )
