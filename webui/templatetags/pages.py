"""Template tags of lists and forms: countdowns, run links, shares and hues."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from webui.presentation import formatting

register = template.Library()

# version 0.1 wrote `r12`
_RUN = re.compile(r"\b(?:r|([Rr]un) )(\d{1,18})\b")


@register.filter
def run_links(text: Any) -> SafeString:
    """Replace `run 12` in a reason with a link to run 12."""
    return mark_safe(_RUN.sub(_run_link, conditional_escape(text or "")))


def _run_link(match: re.Match[str]) -> str:
    return f'<a href="/runs/{match[2]}/">{match[1] or "run"} {match[2]}</a>'


@register.simple_tag
def until(time: datetime) -> SafeString:
    """Return the time left as `<time>`."""
    seconds = (time - timezone.now()).total_seconds()
    text = _("now")
    if seconds >= 5:
        text = _("in %(time)s") % {"time": formatting.remaining(seconds)}
    return format_html(
        '<time datetime="{0}" title="{0}">{1}</time>', time.isoformat(timespec="seconds"), text
    )


@register.simple_tag
def since(time: datetime | None) -> SafeString | str:
    """Return the elapsed time as `<time>`."""
    if time is None:
        return formatting.DASH
    seconds = max(0.0, (timezone.now() - time).total_seconds())
    start = time.isoformat(timespec="seconds")
    return format_html(
        '<time datetime="{0}" title="since {0}">{1}</time>',
        start,
        formatting.duration(round(seconds)),
    )


@register.filter
def memory_of(used: Any, total: Any) -> str:
    """Return `3.1 GiB of 80 GiB`, or the known one of both."""
    if used is None:
        return formatting.memory(total) if total else formatting.DASH
    return (
        _("%(used)s of %(total)s")
        % {"used": formatting.memory(used), "total": formatting.memory(total)}
        if total
        else formatting.memory(used)
    )


@register.filter
def part(value: Any, of: Any = 1) -> float:
    """Return `value` in percent of `of`, 0 to 100; 0 if either is unknown."""
    real, total = formatting.number(value), formatting.number(of)
    return min(100.0, max(0.0, 100 * real / total)) if real is not None and total else 0.0


@register.filter
def css(value: Any) -> str:
    """Format a number for CSS, independent of the locale."""
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


@register.filter
def hue(run: int) -> int:
    """Return one of eight colors, stable per run; 0 for hidden runs."""
    return run % 8 + 1 if run else 0


@register.filter
def plain(value: Any) -> str:
    """Join lists with commas; other values as text."""
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
