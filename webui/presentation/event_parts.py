"""Parts that descriptions of events share: step, rank, reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.utils.translation import gettext as _

from webui.presentation import formatting

# event data and rank → one line
Describer = Callable[[Mapping[str, Any], int | None], str]


def message_of(data: Mapping[str, Any]) -> str:
    """Return an event's own sentence."""
    return str(data.get("message", data.get("says")) or "")  # version 0.1 wrote `says`


def at_step(data: Mapping[str, Any]) -> str:
    """Return " at step N", or nothing without a step."""
    step = data.get("step")
    return _(" at step %(step)s") % {"step": f"{step:,}"} if isinstance(step, int) else ""


def on_rank(rank: int | None) -> str:
    """Return " on rank N", or nothing for the supervisor."""
    return _(" on rank %(rank)s") % {"rank": rank} if rank is not None and rank >= 0 else ""


def shortened(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    if isinstance(value, float):
        return formatting.quantity(value)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def with_reason(title: str) -> Describer:
    """Return a describer: the title with rank, step and reason."""

    def describe_with_reason(data: Mapping[str, Any], rank: int | None) -> str:
        reason = data.get("reason") or message_of(data) or data.get("why")
        return f"{_(title)}{on_rank(rank)}{at_step(data)}" + (
            f": {shortened(reason)}" if reason else ""
        )

    return describe_with_reason
