"""Sample parts of reports for the gallery: blocks in each state, a comparison, ended links."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from django.utils.translation import gettext as _

from orchestrator.reports.block_data import BlockData
from orchestrator.reports.blocks import blocks_in
from orchestrator.reports.differences import difference
from webui.reports.parts import block_part
from webui.views.reports.report_sharing import ENDED

_TABLE: Final = {
    "title": "Best runs",
    "columns": [
        {"key": "model", "type": "text"},
        {"key": "lr", "type": "any"},
        {"key": "min(val_loss)", "type": "number"},
        {"key": "duration", "type": "duration"},
    ],
    "rows": [
        {
            "run": 12,
            "name": "warm-up 200",
            "state": "finished",
            "cells": ["llama-15m", 0.001, 2.1043, 5400],
        },
        {
            "run": 14,
            "name": "a name that is much longer than the column of the table would like it to be",
            "state": "running",
            "cells": ["llama-15m", 0.003, None, None],
        },
    ],
    "more": True,
    "unknown": ["acuracy"],
}
_EMPTY: Final = {"title": "", "columns": [], "rows": [], "more": False, "unknown": []}
_OLD: Final = "# Result\n\nThe best rate is 1e-3.\n\nMore seeds follow.\n"
_NEW: Final = "# Result\n\nThe best rate is 1e-3, in three seeds.\n\nMore seeds follow.\n"
_TIME: Final = datetime(2026, 1, 15, 14, 30, tzinfo=UTC)


def gallery_context() -> dict[str, Any]:
    """The blocks, lines and ended links."""
    live = blocks_in("```runs\nquery: kind = train\n```")[0]
    frozen = blocks_in("```runs frozen 2026-01-15\nquery: kind = train\n```")[0]
    query = "lr > > 3"
    shown = [
        BlockData(live, _TABLE),
        BlockData(
            frozen, {**_TABLE, "title": "Best runs, frozen", "more": False, "unknown": []}, 2, _TIME
        ),
        BlockData(live, _EMPTY),
        BlockData(
            live,
            problem="at character 6: a value is expected",
            where=f"{query}\n     ^",
        ),
    ]
    return {
        "blocks": [block_part(one) for one in shown],
        "lines": difference(_OLD, _NEW),
        "ended": [
            {
                "state": state,
                "title": _(title),
                "text": _(text),
                "link": {"expires": _TIME},
            }
            for state, (title, text) in ENDED.items()
        ],
    }
