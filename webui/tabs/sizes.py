"""Card of the History tab for elastic runs: range, sizes with predictions, devices over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.common import clock
from webui.charts.size_steps import HeldDevices, size_steps
from webui.presentation import formatting


def sizes_card(attempts: Sequence[Any], elastic: dict[str, Any]) -> dict[str, Any]:
    """The card's context; `attempts` in any order, `elastic` as in REST."""
    now, sizes = clock.now(), elastic["sizes"]
    placed = [attempt for attempt in attempts if attempt.placement]
    held = [
        HeldDevices(each.number, each.devices, each.created, each.ended or now) for each in placed
    ]
    used = {each.devices for each in placed}
    return {
        "sentence": _sentence(elastic, len(placed)),
        "picture": size_steps(held, [size["devices"] for size in sizes]),
        "rows": [
            {
                **size,
                "step_time": formatting.duration(size["step_time_s"])
                if size["step_time_s"]
                else "",
                "memory": formatting.memory(size["total_bytes"]) if size["total_bytes"] else "",
                "now": size["devices"] == elastic["devices"],
                "used": size["devices"] in used,
            }
            for size in sizes
        ],
    }


def _sentence(elastic: dict[str, Any], attempts: int) -> str:
    least, most, now = elastic["min_devices"], elastic["max_devices"], elastic["devices"]
    if now is not None:
        text = ngettext(
            "Trains on %(now)s device, of %(least)s to %(most)s.",
            "Trains on %(now)s devices, of %(least)s to %(most)s.",
            now,
        )
        return text % {"now": now, "least": least, "most": most}
    if attempts:
        return _("May use %(least)s to %(most)s devices and holds none.") % {
            "least": least,
            "most": most,
        }
    return _("Starts on the largest size from %(least)s to %(most)s devices that is free.") % {
        "least": least,
        "most": most,
    }
