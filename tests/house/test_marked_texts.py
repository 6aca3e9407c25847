"""Texts in Python and JavaScript of the pages are marked for translation.

Heuristic: a literal with two words is a text, unless it is code, a selector or a pattern.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WEBUI = Path(__file__).resolve().parents[2] / "webui"
MARKS = {"_", "gettext", "gettext_noop", "ngettext", "pgettext", "gettext_lazy"}
LOG_CALLS = {"debug", "info", "warning", "exception"}
AUTHOR_ERRORS = {"TemplateSyntaxError"}  # for authors of templates, when a template is loaded
# samples of user data in the gallery; reasons for closing a socket are part of its protocol
NOT_TRANSLATED = {
    "gallery.py",
    "gallery_engine_sample.py",
    "gallery_history_sample.py",
    "gallery_report_sample.py",
    "gallery_sample.py",
    "consumers.py",
    "modules.py",
    "gallery_panel_samples.py",
}
# code that a user copies, a content type, the state that REST writes, a data file's own texts
CODE = re.compile(
    r"curl |import |python -m |Authorization|charset=|^\s*messages=|^<\w|^client = |^answer = "
    r"|^run = |Why is the sky|To be, or not|control plane|noopener|my own device|^, first in$"
    r"|\\[bw]|^\nadd allow"
)
PROSE = re.compile(
    r"[A-Za-z]{2,} [a-zA-Z]|[a-zA-Z] [A-Za-z]{2,}|[a-z]{2,}[.,:;] |\{\}[,:;]? [a-z]{2,}"
)
KEYS = {"Ctrl+Enter"}
UNITS = re.compile(r"\b(?:min|ms|[shd])\b|\{\}")


def _is_text(text: str) -> bool:
    return bool(PROSE.search(text) and not CODE.search(text) and UNITS.sub("", text).strip())


def unmarked_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of literals outside of translation calls, docstrings and log calls."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))  # docstring
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if name in MARKS | AUTHOR_ERRORS or (owner == "log" and name in LOG_CALLS):
                skipped.update(id(child) for child in ast.walk(node))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(value) for value in node.values)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            text = "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if _is_text(text):
            yield getattr(node, "lineno", 0), text


_JS_TOKEN = re.compile(
    r"(?P<comment>/\*.*?\*/|//[^\n]*)"
    r"|(?P<regex>(?<=[(,=:?]) ?/(?![/*])(?:\\.|\[(?:\\.|[^\]\n])*\]|[^/\n\\])+/[a-z]*)"
    r"|(?P<text>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)",
    re.DOTALL,
)
# texts that a user sees although they have one word
_SINK = re.compile(r"(?:textContent: |textContent = |announce\(|toast\(|confirm\(|prompt\()$")
_SELECTOR = re.compile(r"[\[\]#>=]|^\.|^(?:input|tr|main|details|option)\b|application/|/api/|px")
_NOT_SHOWN = re.compile(
    r"(?:console\.\w+\(|throw new Error\(|className(?: =|:) |(?:closest|matches|matchMedia"
    r"|querySelector|querySelectorAll)(?:\?\.)?\()$"
)


def unmarked_javascript(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of literals outside of `gettext` and `ngettext`."""
    for match in _JS_TOKEN.finditer(source):
        if not match["text"]:
            continue
        before = source[: match.start()].rsplit("\n", 1)[-1]
        text = re.sub(r"\$\{(?:[^{}]|\{[^{}]*\})*\}", "{}", match["text"][1:-1])
        call = source[max(0, match.start() - 400) : match.start()]
        if re.search(r"\bn?gettext\((?:[^()`]|\"[^\"]*\")*$", call) or _NOT_SHOWN.search(before):
            continue
        word = _SINK.search(before) and re.search(r"[A-Za-z]{2}", text) and text not in KEYS
        if word or (_is_text(text) and not _SELECTOR.search(text)):
            yield source[: match.start()].count("\n") + 1, text


def test_unmarked_texts_are_detected() -> None:
    python = 'a = _("in words")\nb = "in words"\nc = f"{a} per step"\nd = f"{a} min"\n'
    assert [line for line, _ in unmarked_python(python)] == [2, 3]
    script = (
        'toast(gettext("Link copied."));\ntoast("Copied");\n// no text here\n'
        "a.textContent = `${n} selected rows`;\nlist.querySelector('tr td');\n"
        'format(ngettext("%(count)s new run", "%(count)s new runs", n), {});\n'
    )
    assert [line for line, _ in unmarked_javascript(script)] == [2, 4]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(WEBUI.rglob("*.py")) if path.name not in NOT_TRANSLATED],
    ids=lambda path: str(path.relative_to(WEBUI)),
)
def test_python_text_is_marked(path: Path) -> None:
    assert list(unmarked_python(path.read_text())) == []


@pytest.mark.parametrize(
    "path", sorted((WEBUI / "static" / "webui" / "js").glob("*.js")), ids=lambda path: path.name
)
def test_javascript_text_is_marked(path: Path) -> None:
    assert list(unmarked_javascript(path.read_text())) == []
