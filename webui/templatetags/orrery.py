"""Template tags: links that exist, state badges, plan glyphs, empty states, and numbers as people
read them.

Knows words and markup; reads no data of its own.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from django import template
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from webui.presentation import formatting

register = template.Library()


@register.simple_tag
def page_url(name: str, *args: Any) -> str:
    """The page's address, empty where this installation has no such page."""
    try:
        return reverse(name, args=args)
    except NoReverseMatch:
        return ""


@register.simple_tag(takes_context=True)
def nav_link(context: dict[str, Any], name: str, title: str, keys: str) -> str:
    """A link of the main navigation with its keys, marked when it leads to the page shown."""
    url = page_url(name)
    if not url:
        return ""
    path = context["request"].path if "request" in context else ""
    here = path == url or (url != "/" and path.startswith(url))
    current = mark_safe(' aria-current="page"') if here else ""
    return format_html(
        '<a href="{}" data-key="{}"{}><svg aria-hidden="true"><use href="#nav-{}"/></svg>{}</a>',
        url,
        keys,
        current,
        name,
        title,
    )


@register.simple_tag
def menu_link(name: str, title: str) -> str:
    url = page_url(name)
    return format_html('<a href="{}">{}</a>', url, title) if url else ""


@register.simple_tag
def state_badge(state: str, live: bool = False) -> SafeString:
    """A state by colour, shape and word; `live` lets the page's socket change it."""
    mark = mark_safe(' data-live="state"') if live else ""
    return format_html(
        '<span class="state state-{0}"{1}><svg aria-hidden="true"><use href="#state-{0}"/></svg>'
        "<span>{0}</span></span>",
        state,
        mark,
    )


@register.simple_tag
def plan_glyph(plan: Any) -> SafeString:
    """A plan as compact words: dp4·tp2·z1 bf16."""
    if not isinstance(plan, dict):
        return format_html('<span class="glyph">{}</span>', plan or "–")
    axes, rest = formatting.plan_words(plan)
    dot = mark_safe("<i>·</i>")
    body = format_html_join(dot, "<b>{}</b>", ((axis,) for axis in axes))
    return format_html(
        '<span class="glyph" title="{}">{} {}</span>', formatting.plan_sentence(plan), body, rest
    )


@register.inclusion_tag("webui/parts/empty.html")
def empty(title: str, text: str = "", url: str = "", label: str = "") -> dict[str, str]:
    """What a page or card says when there is nothing yet, with what to do first."""
    return {"title": title, "text": text, "url": url, "label": label}


@register.simple_tag
def ago(moment: datetime | None) -> str:
    """`<time>` with an age that the page keeps fresh."""
    if moment is None:
        return "–"
    age = formatting.age((timezone.now() - moment).total_seconds())
    return format_html(
        '<time datetime="{0}" title="{0}" data-ago>{1}</time>',
        moment.isoformat(timespec="seconds"),
        age,
    )


@register.filter
def quantity(value: Any, digits: int = 3) -> str:
    """1234567 → 1.23M."""
    return formatting.quantity(value, digits)


@register.filter
def breakable(name: str) -> SafeString:
    """`plan.micro_batch_size` with places where a narrow column may break it."""
    parts = re.split(r"(?<=[._/])(?=.)", str(name))
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in parts))


@register.filter
def gib(value: Any) -> str:
    return formatting.memory(value)


@register.filter
def duration(value: Any) -> str:
    """Seconds → 2 h 05 min."""
    return formatting.duration(value)


@register.filter
def percent(value: Any) -> str:
    return formatting.percent(value)


@register.filter
def words_of(text: str) -> list[str]:
    """A template's list of words."""
    return text.split()
