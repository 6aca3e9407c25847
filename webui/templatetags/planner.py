"""Template filters of the planner's pages: labels of fields, thousands, ids.

Knows words and markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django import template
from django.urls import reverse

from webui.planner.form_fields import FIELDS
from webui.presentation import formatting

register = template.Library()
PAGES = (
    ("planner", "Training"),
    ("planner-serving", "Serving"),
    ("planner-scaling", "Scaling laws"),
    ("planner-examples", "Textbook examples"),
    ("planner-saved", "Saved plans"),
)


@register.filter
def thousands(value: Any) -> str:
    """1204 → 1,204; empty for what is no number."""
    return f"{value:,.0f}" if isinstance(value, int | float) else ""


@register.filter
def field_label(name: str) -> str:
    return FIELDS[name].label if name in FIELDS else name


@register.filter
def shape_hidden(name: str, own_model: bool) -> bool:
    """The shape's field stands only where the model is one's own."""
    return name == "shape" and not own_model


@register.filter
def slugged(text: str) -> str:
    """As an element's id."""
    return re.sub(r"[^a-z0-9_-]+", "-", text)


@register.filter
def seconds(value: Any) -> str:
    return formatting.seconds(value)


@register.filter
def as_query(query: Mapping[str, Any]) -> str:
    """An example's state as a link's query; whole numbers without a dot."""
    told = {
        name: f"{value:.0f}" if isinstance(value, float) and value == int(value) else value
        for name, value in query.items()
    }
    return urlencode(told)


@register.simple_tag
def planner_pages() -> list[tuple[str, str, str]]:
    """`(name, title, address)` of the planner's pages."""
    return [(name, title, reverse(name)) for name, title in PAGES]
