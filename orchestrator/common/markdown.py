"""The Markdown parser of notes, reports and comments. Does not depend on any page."""

from __future__ import annotations

from functools import lru_cache

from markdown_it import MarkdownIt


@lru_cache(maxsize=1)
def parser() -> MarkdownIt:
    """A parser that escapes raw HTML and loads no images."""
    # "commonmark" would pass raw HTML through; images would load from other hosts
    return MarkdownIt("js-default", {"html": False, "linkify": False}).disable("image")
