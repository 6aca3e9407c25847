"""The runs list's filters as they stand in the URL, and the chips that change them.

Knows addresses, not rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from workers.contracts.specs.run import KINDS
from workers.contracts.wire.node_messages import RunState

NAMES = ("state", "kind", "experiment", "tag", "owner", "q")
LIVE_STATES = ("queued", "starting", "running", "stopping", "paused")


@dataclass(frozen=True)
class Chip:
    """A choice of the list: `on` when it is in force, `url` the list with it toggled."""

    says: str
    url: str
    on: bool = False
    count: int | None = None
    state: str = ""


@dataclass(frozen=True)
class RunFilters:
    """What is asked for; empty means everything.

    `state` and `kind` may hold several, commas between.
    """

    state: str = ""
    kind: str = ""
    experiment: str = ""
    tag: str = ""
    owner: str = ""
    q: str = ""
    before: int | None = None

    @classmethod
    def read(cls, query: Mapping[str, Any]) -> RunFilters:
        """Words that no run can have are left out, a wrong cursor too: an old link still shows a
        list.
        """
        values = {name: str(query.get(name, "")).strip()[:200] for name in NAMES}
        values["state"] = ",".join(one for one in _split(values["state"]) if one in set(RunState))
        values["kind"] = ",".join(one for one in _split(values["kind"]) if one in KINDS)
        before = str(query.get("before", ""))
        return cls(
            **values, before=int(before) if before.isdecimal() and len(before) < 19 else None
        )

    @property
    def asked(self) -> dict[str, str]:
        return {name: value for name in NAMES if (value := getattr(self, name))}

    def url(self, **changes: Any) -> str:
        """This list with changes, from its first row unless `before` is among them."""
        query = {**self.asked, **changes}
        text = urlencode({name: value for name, value in query.items() if value not in ("", None)})
        return f"?{text}" if text else "?"

    def state_chips(self, counts: Mapping[str, int]) -> list[Chip]:
        """One a state that has runs or is asked for, in the order of a run's life."""
        chosen = _split(self.state)
        return [
            Chip(
                state,
                self.url(state=_toggled(chosen, state)),
                state in chosen,
                counts.get(state, 0),
                state,
            )
            for state in RunState
            if counts.get(state) or state in chosen
        ]

    def asked_chips(self) -> list[Chip]:
        """What is in force besides states, each with the list without it."""
        words = {
            "q": "“{}”",
            "tag": "tag {}",
            "owner": "by {}",
            "experiment": "in {}",
            "kind": "{}",
        }
        return [
            Chip(words[name].format(value), self.url(**{name: ""}), True)
            for name, value in self.asked.items()
            if name != "state"
        ]


def _split(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _toggled(chosen: list[str], one: str) -> str:
    return ",".join(
        [*chosen, one] if one not in chosen else [item for item in chosen if item != one]
    )
