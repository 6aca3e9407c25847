"""Template filters of the planner pages: field labels, numbers, ids and queries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django import template
from django.urls import reverse
from django.utils.translation import gettext, gettext_noop

from webui.planner.form_fields import FIELDS
from webui.presentation import formatting

register = template.Library()
PAGES = (
    ("planner", gettext_noop("Training")),
    ("planner-serving", gettext_noop("Serving")),
    ("planner-serving-load", gettext_noop("Serving under load")),
    ("planner-scaling", gettext_noop("Scaling laws")),
    ("planner-examples", gettext_noop("Textbook examples")),
    ("planner-saved", gettext_noop("Saved plans")),
    ("planner-accuracy", gettext_noop("Accuracy")),
)


@register.filter
def thousands(value: Any) -> str:
    """Formats 1204 as 1,204; empty if it is not a number."""
    return f"{value:,.0f}" if isinstance(value, int | float) else ""


@register.filter
def field_label(name: str) -> str:
    """Returns the label of a planner field."""
    return gettext(FIELDS[name].label) if name in FIELDS else name


@register.filter
def shape_hidden(name: str, own_model: bool) -> bool:
    """Whether the model JSON field is hidden."""
    return name == "shape" and not own_model


@register.filter
def slugged(text: str) -> str:
    """Converts text to an element id."""
    return re.sub(r"[^a-z0-9_-]+", "-", text)


@register.filter
def seconds(value: Any) -> str:
    """Formats seconds."""
    return formatting.seconds(value)


@register.filter
def as_query(query: Mapping[str, Any]) -> str:
    """Returns the query string of an example; integers without a decimal point."""
    values = {
        name: f"{value:.0f}" if isinstance(value, float) and value == int(value) else value
        for name, value in query.items()
    }
    return urlencode(values)


@register.simple_tag
def planner_pages() -> list[tuple[str, str, str]]:
    """Returns `(name, title, URL)` of the planner pages."""
    return [(name, gettext(title), reverse(name)) for name, title in PAGES]
