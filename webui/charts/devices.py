"""The device grid: what a device's mark shows. Pure.

The core's fill is progress, not utilisation: a hung GPU reads 100% utilised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting as words

FRESH_S: Final = 15.0  # a last step younger than this is progress, whatever the step time
RING: Final = 2 * 3.14159265 * 20  # circumference of the ring drawn, radius 20


@dataclass(frozen=True, slots=True)
class Mark:
    """`mood`: idle, busy, slow, stuck, foreign or gone; `fill` and `ring` are per cent."""

    node: str
    index: int
    mood: str
    fill: float
    ring: float
    words: str
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
) -> Mark:
    """`run`: {id, name, owner, state, age_s (of its last step), step_time_s, mfu} of the holder,
    None if free.
    """
    sample = sample or {}
    used = words.number(sample.get("memory_used_bytes"))
    ring = min(100.0, 100 * used / memory_bytes) if used is not None and memory_bytes else 0.0
    power = words.number(sample.get("power_w"))
    told = []
    if used is not None and memory_bytes:
        told.append(f"memory {words.memory(used)} of {words.memory(memory_bytes)}")
    if power is not None:
        told.append(f"{power:.0f} W")
    mood, fill, says = _mood(health, drained, healthy, sample, run)
    sentence = f"{node} device {index}: {says}" + (f"; {', '.join(told)}" if told else "")
    return Mark(
        node,
        index,
        mood,
        fill,
        ring,
        sentence,
        run["id"] if run else None,
        f"{RING * ring / 100:.1f} {RING:.1f}",
    )


def _mood(
    health: str,
    drained: bool,
    healthy: bool,
    sample: Mapping[str, Any],
    run: Mapping[str, Any] | None,
) -> tuple[str, float, str]:
    if health == "lost":
        return "gone", 0, "its node is lost"
    if not healthy:
        return "gone", 0, "unhealthy"
    if run is None:
        if sample.get("processes") and (words.number(sample.get("utilization")) or 0) > 0.05:
            return (
                "foreign",
                100,
                f"free, but used by {_processes(sample)} that Orrery did not start",
            )
        return (
            "idle",
            0,
            "drained" if drained else ("free" if health == "up" else "its node is silent"),
        )
    whose = f"run {run['id']} {run['name']}, {run['owner']}"
    age, mfu = run.get("age_s"), words.number(run.get("mfu"))
    if run.get("state") != "running" or age is None:
        return "busy", 20, f"{whose}, {run.get('state')}"
    usual = 5 * (words.number(run.get("step_time_s")) or 0)
    last = f"{whose}; last step {words.age(age)}" + (
        f", MFU {words.percent(mfu)}" if mfu is not None else ""
    )
    if age > max(8 * FRESH_S, 4 * usual):
        return "stuck", 100, last + ", it may hang"
    if age > max(FRESH_S, usual):
        return "slow", 100, last
    return "busy", 30 + 70 * min(1.0, (mfu if mfu is not None else 0.5) / 0.6), last


def _processes(sample: Mapping[str, Any]) -> str:
    return words.count(len(sample["processes"]), "process", "processes")
