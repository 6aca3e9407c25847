"""Markdown of people's notes as HTML that cannot hurt: raw HTML stays text, links carry safe
schemes only.
"""

from __future__ import annotations

from functools import lru_cache

from django.utils.safestring import SafeString
from markdown_it import MarkdownIt


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    # "commonmark" would let raw HTML through; images would call other hosts
    return MarkdownIt("js-default", {"html": False, "linkify": False}).disable("image")


def rendered(text: str) -> SafeString:
    """Headings begin one level below the page's own."""
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("rel", "noopener noreferrer nofollow")
    return SafeString(parser.renderer.render(tokens, parser.options, {}))
