"""Computes the marks of the device grid. Pure functions.

The core's fill is progress, not utilization: a hung GPU reports 100% utilization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.presentation import formatting

FRESH_S: Final = 15.0  # a last step younger than this counts as progress, whatever the step time
RING: Final = 2 * 3.14159265 * 20  # circumference of the ring, radius 20


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """`mood`: idle, busy, slow, stuck, foreign or unavailable; `fill` and `ring` are percent."""

    node: str
    index: int
    mood: str
    fill: float
    ring: float
    description: str
    run: int | None
    ring_dash: str


def mark(
    *,
    node: str,
    health: str,
    drained: bool,
    index: int,
    healthy: bool,
    memory_bytes: int,
    sample: Mapping[str, Any] | None,
    run: Mapping[str, Any] | None,
    cordoned: bool = False,
) -> DeviceMark:
    """Return the mark of a device.

    `run` is {id, name, owner, state, age_s (of its last step), step_time_s, mfu}; None if free.
    """
    sample = sample or {}
    used = formatting.number(sample.get("memory_used_bytes"))
    ring = min(100.0, 100 * used / memory_bytes) if used is not None and memory_bytes else 0.0
    power = formatting.number(sample.get("power_w"))
    details = []
    if used is not None and memory_bytes:
        details.append(
            _("memory %(used)s of %(total)s")
            % {"used": formatting.memory(used), "total": formatting.memory(memory_bytes)}
        )
    if power is not None:
        details.append(f"{power:.0f} W")
    idle = _("cordoned") if cordoned else (_("drained") if drained else "")
    mood, fill, label = _mood(health, idle, healthy, sample, run)
    text = _("%(node)s device %(index)s: %(state)s") % {
        "node": node,
        "index": index,
        "state": label,
    }
    text += f"; {', '.join(details)}" if details else ""
    return DeviceMark(
        node,
        index,
        mood,
        fill,
        ring,
        text,
        run["id"] if run else None,
        f"{RING * ring / 100:.1f} {RING:.1f}",
    )


def _mood(
    health: str,
    idle: str,
    healthy: bool,
    sample: Mapping[str, Any],
    run: Mapping[str, Any] | None,
) -> tuple[str, float, str]:
    if health == "lost":
        return "unavailable", 0, _("node lost")
    if not healthy:
        return "unavailable", 0, _("unhealthy")
    if run is None:
        if sample.get("processes") and (formatting.number(sample.get("utilization")) or 0) > 0.05:
            return (
                "foreign",
                100,
                _foreign(len(sample["processes"])),
            )
        return (
            "idle",
            0,
            idle or (_("free") if health == "up" else _("node silent")),
        )
    run_text = _("run %(id)s %(name)s, %(owner)s") % {
        "id": run["id"],
        "name": run["name"],
        "owner": run["owner"],
    }
    age, mfu = run.get("age_s"), formatting.number(run.get("mfu"))
    if run.get("state") != "running" or age is None:
        return "busy", 20, f"{run_text}, {run.get('state')}"
    last = _("%(run)s; last step %(age)s") % {"run": run_text, "age": formatting.age(age)}
    last += f", MFU {formatting.percent(mfu)}" if mfu is not None else ""
    mood = progress("running", age, formatting.number(run.get("step_time_s")))
    if mood == "stuck":
        return mood, 100, last + _(", it may hang")
    if mood == "slow":
        return mood, 100, last
    return "busy", 30 + 70 * min(1.0, (mfu if mfu is not None else 0.5) / 0.6), last


def progress(state: str, age_s: float, step_time_s: float | None) -> str:
    """`busy`, `slow` or `stuck` from the age of a run's last step, compared with its step time."""
    usual = 5 * (step_time_s or 0)
    if state != "running" or age_s <= max(FRESH_S, usual):
        return "busy"
    return "stuck" if age_s > max(8 * FRESH_S, 4 * usual) else "slow"


def _foreign(count: int) -> str:
    return ngettext(
        "free, but used by %(count)s process that Orrery did not start",
        "free, but used by %(count)s processes that Orrery did not start",
        count,
    ) % {"count": count}
