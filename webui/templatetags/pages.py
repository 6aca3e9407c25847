"""Template tags of lists and forms: moments to come, run numbers as links, parts and hues.

Knows words and markup.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString, mark_safe

from webui.presentation import formatting

register = template.Library()

_RUN = re.compile(r"\br(\d{1,18})\b")


@register.filter
def run_links(text: Any) -> SafeString:
    """A reason's `r12` as a link to run 12."""
    return mark_safe(_RUN.sub(r'<a href="/runs/\1/">run \1</a>', conditional_escape(text or "")))


@register.simple_tag
def until(moment: datetime) -> SafeString:
    """How long until then; the moment itself as the title."""
    seconds = (moment - timezone.now()).total_seconds()
    says = "any moment" if seconds < 5 else f"in {formatting.duration(seconds)}"
    return format_html(
        '<time datetime="{0}" title="{0}">{1}</time>', moment.isoformat(timespec="seconds"), says
    )


@register.simple_tag
def since(moment: datetime | None) -> SafeString | str:
    """How long it lasts already."""
    if moment is None:
        return formatting.DASH
    seconds = max(0.0, (timezone.now() - moment).total_seconds())
    start = moment.isoformat(timespec="seconds")
    return format_html(
        '<time datetime="{0}" title="since {0}">{1}</time>',
        start,
        formatting.duration(round(seconds)),
    )


@register.filter
def memory_of(used: Any, total: Any) -> str:
    """`3.1 of 80 GiB`, or what is known of it."""
    if used is None:
        return formatting.memory(total) if total else formatting.DASH
    return (
        f"{formatting.memory(used)} of {formatting.memory(total)}"
        if total
        else formatting.memory(used)
    )


@register.filter
def part(value: Any, of: Any = 1) -> float:
    """`value` as per cent of `of`, 0 to 100; 0 where either is not known."""
    real, whole = formatting.number(value), formatting.number(of)
    return min(100.0, max(0.0, 100 * real / whole)) if real is not None and whole else 0.0


@register.filter
def css(value: Any) -> str:
    """A number as style sheets read it, whatever the language of the page."""
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


@register.filter
def hue(run: int) -> int:
    """One of eight colours, the same for a run everywhere; 0 for runs of others."""
    return run % 8 + 1 if run else 0


@register.filter
def plain(value: Any) -> str:
    """Lists as words with commas, everything else as it is."""
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
