"""Template tags of all pages: links, state badges, plan glyphs, empty states, numbers."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

from django import template
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from webui.forms.spec_fields import FIELDS_BY_PATH
from webui.presentation import formatting, problems
from webui.views.outages import troubles

register = template.Library()


@register.simple_tag
def page_url(name: str, *args: Any) -> str:
    """Return a page's URL; empty if this installation has no such page."""
    try:
        return reverse(name, args=args)
    except NoReverseMatch:
        return ""


@register.simple_tag(takes_context=True)
def nav_link(context: dict[str, Any], name: str, title: str, keys: str) -> str:
    """Return a link of the main navigation with its keys; marks the current page."""
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
    """Return a link, or nothing if the page does not exist."""
    url = page_url(name)
    return format_html('<a href="{}">{}</a>', url, title) if url else ""


@register.inclusion_tag("webui/parts/outages.html")
def outages() -> dict[str, Any]:
    """Name what is down, with the page itself: a note that arrives later moves the page."""
    return {"troubles": troubles()}


@register.simple_tag
def state_badge(state: str, live: bool = False) -> SafeString:
    """Show a state by color, shape and text; `live` allows updates by the page's socket."""
    mark = mark_safe(' data-live="state"') if live else ""
    return format_html(
        '<span class="state state-{0}"{1}><svg aria-hidden="true"><use href="#state-{0}"/></svg>'
        "<span>{2}</span></span>",
        state,
        mark,
        _(state),
    )


@register.simple_tag
def plan_glyph(plan: Any) -> SafeString:
    """Show a plan in short form: dp4·tp2·z1 bf16."""
    if not isinstance(plan, dict):
        return format_html('<span class="glyph">{}</span>', plan or "–")
    return _plan_glyph(json.dumps(plan, default=str), get_language())


@lru_cache(maxsize=512)
def _plan_glyph(text: str, _language: str | None) -> SafeString:
    """The glyph of a plan as JSON; runs of a list often have the same plan."""
    plan = json.loads(text)
    axes, rest = formatting.plan_parts(plan)
    dot = mark_safe("<i>·</i>")
    body = format_html_join(dot, "<b>{}</b>", ((axis,) for axis in axes))
    return format_html(
        '<span class="glyph" title="{}">{} {}</span>', formatting.describe_plan(plan), body, rest
    )


@register.inclusion_tag("webui/parts/empty.html")
def empty(title: str, text: str = "", url: str = "", label: str = "") -> dict[str, str]:
    """Show an empty state with the next action."""
    return {"title": title, "text": text, "url": url, "label": label}


@register.simple_tag
def ago(time: datetime | None) -> str:
    """Return `<time>` with an age that the page's script updates."""
    if time is None:
        return "–"
    age = formatting.age((timezone.now() - time).total_seconds())
    return format_html(
        '<time datetime="{0}" title="{0}" data-ago>{1}</time>',
        time.isoformat(timespec="seconds"),
        age,
    )


@register.filter
def quantity(value: Any, digits: int = 3) -> str:
    """1234567 → 1.23M."""
    return formatting.quantity(value, digits)


@register.filter
def breakable(name: str) -> SafeString:
    """Allow line breaks after `.`, `_` and `/`."""
    parts = re.split(r"(?<=[._/])(?=.)", str(name))
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in parts))


@register.filter
def unlocalized(value: float) -> str:
    """Format a number for an attribute, with a decimal point in every language."""
    return f"{value:g}"


@register.filter
def gib(value: Any) -> str:
    """Format bytes in binary units."""
    return formatting.memory(value)


@register.filter
def lineage_url(node: Any) -> str:
    """Return the page of a run or data set in a lineage picture."""
    if node.run is not None:
        return reverse("run", args=[node.run.pk])
    name, _, version = node.data_set.partition("@")
    return reverse("data-set-version", args=[name, version])


@register.filter
def remaining(value: Any) -> str:
    """Format a predicted duration for a labeled field: 35 min."""
    return formatting.remaining(value)


@register.filter
def duration(value: Any) -> str:
    """Seconds → 2 h 05 min."""
    return formatting.duration(value)


@register.filter
def percent(value: Any) -> str:
    """Format a fraction as percent."""
    return formatting.percent(value)


@register.filter
def split_words(text: str) -> list[str]:
    """Split a template's text at spaces."""
    return text.split()


@register.simple_tag
def problem_text(problem: Any) -> str:
    """Returns message and hint of a problem as sentences."""
    return problems.problem_text(problem)


@register.simple_tag
def problem_fix(problem: Any) -> dict[str, str] | None:
    """Returns `{field, label, value}` of the change that solves a problem; None without one."""
    fix = problems.fix_of(problem, FIELDS_BY_PATH)
    if fix is None:
        return None
    label = _(FIELDS_BY_PATH[fix.field].label)
    return {"field": fix.field, "label": label[:1].lower() + label[1:], "value": fix.value}


@register.filter
def sentence(text: str) -> str:
    """Returns text with a capital first letter and one period at the end."""
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


@register.simple_tag
def sample_lines(lines: list[str]) -> SafeString:
    """Joins the lines of a sample; a mark shows each line break."""
    return format_html_join(
        "", "{}{}", ((mark_safe("<i>↵</i>") if i else "", line) for i, line in enumerate(lines))
    )


@register.simple_tag
def table_head(*titles: str, numeric: str = "") -> SafeString:
    """Return a table's head with one column per title; an empty title is a column of actions.

    `numeric` lists the columns of numbers, from 1, such as "2,5".
    """
    hidden = format_html('<span class="visually-hidden">{}</span>', _("Actions"))
    numbers = {int(each) for each in numeric.split(",") if each}
    cells = (
        (mark_safe(' class="num"') if place in numbers else "", title or hidden)
        for place, title in enumerate(titles, 1)
    )
    row = format_html_join("", '<th scope="col"{}>{}</th>', cells)
    return format_html("<thead><tr>{}</tr></thead>", row)
