"""Identifiers, pages, errors, comments and documents use standard terms, not the listed words."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.vocabulary import IDENTIFIER_WORDS, PHRASES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("orchestrator", "webui", "workers", "kernels", "tests", "tools", "manage.py")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PHRASES = re.compile("|".join(PHRASES), re.IGNORECASE | re.MULTILINE)
# these files quote the words: the list itself, its test, and the map of renamed things
_QUOTING = {"tests/house/vocabulary.py", "tests/house/test_vocabulary.py", "CHANGELOG.md"}
# a line with this note, and the line after it, may use a word: it names data that the release wrote
_OLD_DATA = "version 0.1"
_TORCH_NAMES = {"found_inf", "not_found"}  # names of torch and HTTP


def tracked(*endings: str) -> list[Path]:
    """Files that git tracks, or would track, with one of the endings."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [
        ROOT / name
        for name in listed
        if name.endswith(endings)
        and name not in _QUOTING
        and not name.startswith("webui/static/plotly/")  # built from code of others
        and (ROOT / name).is_file()
    ]


def python_files() -> list[Path]:
    return [
        path
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] in PACKAGES and "migrations" not in path.parts
    ]


@cache
def words_of(identifier: str) -> frozenset[str]:
    """`lastStood_at` → {"last", "stood", "at"}."""
    return frozenset(part.lower() for part in _PART.findall(identifier))


def may_define_a_banned_word(source: str) -> bool:
    """Whether any word of a file, in code or text, contains a banned one; cheaper than parsing."""
    return any(
        words_of(word) & IDENTIFIER_WORDS.keys() for word in set(_IDENTIFIER.findall(source))
    )


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a file defines: functions, classes, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def lines_on_old_data(source: str) -> set[int]:
    """Numbers of the lines that carry the note about version 0.1, each with the line after it."""
    noted = [at for at, line in enumerate(source.split("\n"), 1) if _OLD_DATA in line]
    return {line for at in noted for line in (at, at + 1)}


def banned_identifiers() -> list[str]:
    problems = []
    for path in python_files():
        name = path.relative_to(ROOT)
        source = path.read_text(encoding="utf-8")
        allowed = lines_on_old_data(source)
        tree = ast.parse(source if may_define_a_banned_word(source) else "")
        for line, identifier in [(0, path.stem), *definitions(tree)]:
            for word in words_of(identifier) & IDENTIFIER_WORDS.keys():
                if line not in allowed and identifier.lower() not in _TORCH_NAMES:
                    problems.append(f"{name}:{line}: {identifier}: use {IDENTIFIER_WORDS[word]}")
    return sorted(set(problems))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and string of a Python file, or of each line of another."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.split("\n"), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


@cache
def _candidates() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Patterns that match wherever a phrase does: those for text in lower case, and the others.

    One that starts with letters in one case is searched for as fast as a substring.
    """
    lower, other = list[re.Pattern[str]](), list[re.Pattern[str]]()
    for phrase in PHRASES:
        start = phrase.removeprefix(r"\b")
        if "(?-i:" in phrase:
            other.append(re.compile(start, re.IGNORECASE | re.MULTILINE))
        else:
            lower.append(re.compile(start.lower(), re.MULTILINE))
    return lower, other


def may_contain_a_phrase(source: str) -> bool:
    """Whether a file may contain a phrase, in code or text."""
    lower, other = _candidates()
    lowered = source.lower()
    return any(each.search(lowered) for each in lower) or any(each.search(source) for each in other)


def banned_phrases(paths: list[Path]) -> list[str]:
    problems = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if not may_contain_a_phrase(source):  # cheaper than reading the tokens
            continue
        allowed = lines_on_old_data(source)
        for line, text in texts(path):
            for match in _PHRASES.finditer(text):
                at = line + text.count("\n", 0, match.start())
                if at not in allowed:
                    problems.append(f"{path.relative_to(ROOT)}:{at}: {match.group().strip()!r}")
    return problems


def test_identifiers_use_standard_terms() -> None:
    problems = banned_identifiers()
    assert not problems, f"{len(problems)} identifiers:\n" + "\n".join(problems[:60])


@pytest.mark.parametrize(
    "endings",
    [(".py",), (".html", ".js", ".css"), (".md", ".toml", ".yml", ".yaml", ".example", "Makefile")],
    ids=["python", "pages", "documents"],
)
def test_text_uses_standard_terms(endings: tuple[str, ...]) -> None:
    paths = python_files() if endings == (".py",) else tracked(*endings)
    problems = banned_phrases(paths)
    assert not problems, f"{len(problems)} phrases:\n" + "\n".join(problems[:60])


def test_a_note_about_old_data_allows_its_line_and_the_next() -> None:
    source = 'a = 1\nold = row["told"]  # version 0.1 wrote `told`\nb = "told"\nc = "told"'
    assert lines_on_old_data(source) == {2, 3}


def test_the_check_sees_a_banned_word(tmp_path: Path) -> None:
    assert words_of("lastStood_at") == {"last", "stood", "at"}
    assert may_define_a_banned_word("def f(lastStood_at): ...")
    assert not may_define_a_banned_word("def f(understood): ...")
    page = tmp_path / "page.html"
    page.write_text("<p>Ready.</p>\n<p>The node was told.</p>")
    assert [match for _, text in texts(page) for match in _PHRASES.findall(text)] == ["told"]
    for text in (
        "# Told.",
        "# it is\n",
        "# Knows",
        "# KNOWS nothing",
        "# The value is none",
        "# it GOES on",
    ):
        assert may_contain_a_phrase(text) >= bool(_PHRASES.search(text)), text
    assert not may_contain_a_phrase("if value is None: return")
