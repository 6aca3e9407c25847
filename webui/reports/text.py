"""Renders a report's Markdown as parts: safe HTML, and blocks that draw data.

`run:12` becomes a link with the run's name, if its reader sees the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import slugify
from markdown_it.token import Token

from orchestrator.common.markdown import parser
from orchestrator.reports.blocks import Block, blocks_of

_RUN: Final = re.compile(r"\brun:([0-9]{1,18})\b")
_MOST_RUNS: Final = 500  # mentions of a report that are looked up


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading for the table of contents; `level` 2 is the highest."""

    level: int
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the text, or a block."""

    html: str = ""  # safe
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class RenderedReport:
    """The parts in order, and the headings."""

    parts: list[Part]
    headings: list[Heading]


def render_report(
    text: str,
    *,
    runs: Callable[[set[int]], Mapping[int, Any]],
    public: bool = False,
) -> RenderedReport:
    """Render a text. `runs` returns the mentioned runs that the reader sees.

    `public`: for readers without a login; links to pages of this server become text.
    """
    markdown = parser()
    tokens = markdown.parse(text)
    mentioned = runs(set(sorted(_mentions(tokens))[:_MOST_RUNS]))
    headings = _headings(tokens)
    for token in tokens:
        if token.children:
            token.children = _inline(token.children, mentioned, public)
    parts, start = list[Part](), 0
    for block in blocks_of(tokens):
        parts.append(_html(tokens[start : block.token]))
        parts.append(Part(block=block))
        start = block.token + 1
    parts.append(_html(tokens[start:]))
    return RenderedReport([part for part in parts if part.block or part.html], headings)


def _html(tokens: list[Token]) -> Part:
    markdown = parser()
    return Part(SafeString(markdown.renderer.render(tokens, markdown.options, {}).strip()))


def _mentions(tokens: list[Token]) -> set[int]:
    """The runs that the text mentions."""
    return {
        int(number)
        for token in tokens
        for child in token.children or ()
        if child.type == "text"
        for number in _RUN.findall(child.content)
    }


def _headings(tokens: list[Token]) -> list[Heading]:
    """Give headings ids, and levels from 2 on, below the report's title and without gaps."""
    headings, used = list[Heading](), set[str]()
    written = [int(token.tag[1]) for token in tokens if token.type == "heading_open"]
    highest, level = min(written, default=1), 1
    for place, token in enumerate(tokens):
        if token.type not in ("heading_open", "heading_close"):
            continue
        if token.type == "heading_open":
            level = min(int(token.tag[1]) - highest + 2, level + 1, 6)
        token.tag = f"h{level}"
        if token.type == "heading_open":
            inline = tokens[place + 1]
            shown = "".join(child.content for child in inline.children or ())
            slug = slugify(shown)[:60] or "section"
            name, number = slug, 1
            while name in used:
                number += 1
                name = f"{slug}-{number}"
            used.add(name)
            token.attrSet("id", f"section-{name}")
            headings.append(Heading(level, f"section-{name}", shown))
    return headings


def _inline(children: list[Token], runs: Mapping[int, Any], public: bool) -> list[Token]:
    """Mark links of other servers, drop private ones, and replace mentions of runs."""
    result, dropped, depth = list[Token](), list[bool](), 0
    for child in children:
        if child.type == "link_open":
            depth += 1
            child.attrSet("rel", "noopener noreferrer nofollow")
            dropped.append(public and not _is_public(str(child.attrs.get("href", ""))))
            if dropped[-1]:
                continue
        elif child.type == "link_close":
            depth -= 1
            if dropped.pop():
                continue
        elif child.type == "text" and not depth:
            result += _with_runs(child, runs, public)
            continue
        result.append(child)
    return result


def _is_public(address: str) -> bool:
    """Whether a link leads out of this server, or to a place on the page."""
    if address.startswith("#"):
        return True
    parts = urlsplit(address)
    return parts.scheme in ("http", "https", "mailto") and bool(parts.netloc or parts.path)


def _with_runs(token: Token, runs: Mapping[int, Any], public: bool) -> list[Token]:
    result, at = list[Token](), 0
    for match in _RUN.finditer(token.content):
        run = runs.get(int(match[1]))
        if run is None:
            continue
        result += [_text(token.content[at : match.start()]), _run(run, public)]
        at = match.end()
    return [*result, _text(token.content[at:])] if at else [token]


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _run(run: Any, public: bool) -> Token:
    shown = format_html(
        '<svg aria-hidden="true"><use href="#state-{}"/></svg><span class="muted">{}</span> {}',
        run.state,
        run.pk,
        run.name,
    )
    if public:
        html = format_html('<span class="run-link state-{}">{}</span>', run.state, shown)
    else:
        html = format_html(
            '<a class="run-link state-{}" href="{}">{}</a>',
            run.state,
            reverse("run", args=[run.pk]),
            shown,
        )
    return Token("html_inline", "", 0, content=html)
