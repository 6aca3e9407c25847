"""The template tag `switch`: one part per value, and what it refuses."""

from __future__ import annotations

import pytest
from django.template import TemplateSyntaxError, engines
from django.template.base import TextNode

PARTS = (
    "{% load switch %}{% switch item.kind %}\n"
    '{% case "a" %}A{% if deep %}!{% endif %}{% case "b" %}B{{ item.kind }}'
)


def test_the_part_of_the_value_is_rendered() -> None:
    page = engines["django"].from_string(PARTS + "{% else %}other{% endswitch %}.")
    texts = {kind: page.render({"item": {"kind": kind}, "deep": True}) for kind in ("a", "b", "")}
    assert texts == {"a": "A!.", "b": "Bb.", "": "other."}
    assert page.render({}) == "other.", "an unknown variable"
    nodes = page.template.nodelist.get_nodes_by_type(TextNode)
    assert {node.s for node in nodes} == {"A", "!", "B", "other", "."}
    assert engines["django"].from_string(PARTS + "{% endswitch %}").render({}) == ""


@pytest.mark.parametrize(
    "text",
    [
        "{% switch %}{% case 'a' %}{% endswitch %}",
        "{% switch x %}text{% case 'a' %}{% endswitch %}",
        "{% switch x %}{{ y }}{% case 'a' %}{% endswitch %}",
        "{% switch x %}{% case a %}{% endswitch %}",
        "{% switch x %}{% case 'a' 'b' %}{% endswitch %}",
        "{% switch x %}{% case 'a' %}{% case 'a' %}{% endswitch %}",
        "{% switch x %}{% case 'a' %}",
        "{% switch x %}{% endswitch %}",
    ],
)
def test_wrong_parts_are_refused(text: str) -> None:
    with pytest.raises(TemplateSyntaxError):
        engines["django"].from_string("{% load switch %}" + text)
