"""Renders users' Markdown notes as safe HTML: raw HTML is escaped, links use safe schemes only."""

from __future__ import annotations

from django.utils.safestring import SafeString

from orchestrator.common.markdown import parser as _parser


def render_markdown(text: str) -> SafeString:
    """Render Markdown; its headings start below the page's own two levels."""
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("rel", "noopener noreferrer nofollow")
    return SafeString(parser.renderer.render(tokens, parser.options, {}))
