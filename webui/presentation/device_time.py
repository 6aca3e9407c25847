"""Device time of ended attempts as a stacked bar with its text: productive, and lost by cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.scheduling.accounting.ledger import Total
from webui.presentation import formatting

_PRODUCTIVE: Final = (gettext_noop("productive"), "throughput")
_CAUSES: Final = {
    "startup": (gettext_noop("start-up"), "time"),
    "trials": (gettext_noop("trials of plans"), "mfu"),
    "restart": (gettext_noop("restart"), "loss"),
    "hang": (gettext_noop("hang"), "fail"),
    "node": (gettext_noop("lost node"), "event"),
    "preemption": (gettext_noop("preemption"), "lr"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A segment of the bar: `part` in percent of the allocated time."""

    title: str
    hue: str
    part: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The segments that are not empty, and the same numbers as one sentence."""

    parts: list[Part]
    sentence: str
    waited: str
    final: bool


def bar(total: Total | None) -> Bar | None:
    """The bar of a sum; None without allocated time."""
    if total is None or total.allocated <= 0:
        return None
    rows = [(*_PRODUCTIVE, total.productive)]
    rows += [(*_CAUSES[cause], seconds) for cause, seconds in total.lost.items()]
    parts = [
        Part(_(title), hue, 100 * seconds / total.allocated, device_time(seconds))
        for title, hue, seconds in rows
        if seconds > 0
    ]
    lost = sum(total.lost.values())
    sentence = _("%(lost)s of %(allocated)s lost (%(part)s).") % {
        "lost": device_time(lost),
        "allocated": device_time(total.allocated),
        "part": f"{lost / total.allocated:.1%}",
    }
    waited = device_time(total.queued) if total.queued > 0 else ""
    return Bar(parts, sentence, waited, total.final)


def device_time(seconds: float) -> str:
    """`12.5 device-hours`, or `40 device-seconds` below a tenth of an hour."""
    if seconds < 360:
        return _("%(value)s device-seconds") % {"value": formatting.quantity(seconds)}
    return _("%(value)s device-hours") % {"value": formatting.quantity(seconds / 3600)}
