"""Data sets among the choices of the new-run form's data."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext as _

from orchestrator.runs.datasets import selectors
from webui.forms.spec_fields import DATA_SET

_MOST: Final = 50


def with_data_sets(sections: list[dict[str, Any]], *, user: Any) -> list[dict[str, Any]]:
    """Add the newest usable data sets that the user sees, and the current one, to the choices."""
    offered = _usable(user)
    for section in sections:
        for item in section["fields"]:
            if item["field"].path == "data.preset":
                chosen = item["value"].removeprefix(DATA_SET)
                if item["value"].startswith(DATA_SET) and chosen not in offered:
                    offered.append(chosen)
                item["choices"] = [
                    *(pair for pair in item["choices"] if not pair[0].startswith(DATA_SET)),
                    *(
                        (DATA_SET + name, _("data set %(name)s") % {"name": name})
                        for name in offered
                    ),
                ]
    return sections


def input_choices(*, user: Any) -> list[str]:
    """Texts that name a data set in place of an input file."""
    return [DATA_SET + name for name in _usable(user)]


def _usable(user: Any) -> list[str]:
    rows = selectors.newest_of_each(user=user)[:_MOST]
    return [row.name for row in rows if row.usable]
