"""What a program recorded about itself, as rows of texts: configuration, summary and origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext as _

from orchestrator.tracking.selectors import flat

MOST: Final = 200  # rows of a dictionary on the page
_LONGEST: Final = 300  # characters of a value


def recorded_parts(details: Any) -> list[dict[str, Any]]:
    """`[{title, rows, more, json}]` of the configuration and summary that are not empty."""
    if details is None:
        return []
    titled = ((_("Recorded configuration"), details.config), (_("Summary"), details.summary))
    return [
        {
            "title": title,
            "rows": [
                (name, value_text(value)) for name, value in list(flat(values).items())[:MOST]
            ],
            "more": max(0, len(flat(values)) - MOST),
            "json": json.dumps(values, indent=2, ensure_ascii=False),
        }
        for title, values in titled
        if values
    ]


def value_text(value: Any) -> str:
    """A value of a configuration as text; numbers as in the runs table."""
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def origin_rows(program: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """`(label, text, is code)` of the fields that the program recorded."""
    command = " ".join(program.get("command") or [])
    commit = program.get("commit") or ""
    if commit and program.get("dirty"):
        commit = _("%(commit)s with changes") % {"commit": commit}
    rows = (
        (_("command"), command, True),
        (_("commit"), commit, True),
        (_("branch"), program.get("branch") or "", False),
        (_("remote"), program.get("remote") or "", False),
        (_("folder"), program.get("folder") or "", False),
        (_("host"), program.get("host") or "", False),
        (_("Python"), program.get("python") or "", False),
    )
    return [(label, str(text), is_code) for label, text, is_code in rows if text]
