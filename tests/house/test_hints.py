"""Hints of errors: imperative sentences at their source, because pages print them as they are."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("orchestrator", "workers", "webui", "deploy", "kernels", "tools")
# their `hint` is the caption of a field, a column or a number, not of an error
CAPTIONS = {"tile", "PlannerField", "ColumnHead"}
# starts like a sentence; a placeholder may hold its first words
_START = re.compile(r"[A-Z{]")


@cache
def _sources() -> dict[Path, str]:
    return {
        path: path.read_text()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "migrations" not in path.parts
    }


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_sources()[path])


def _trees(pattern: str) -> Iterator[tuple[Path, ast.Module]]:
    """The files whose source matches the pattern: reading text is cheaper than parsing it."""
    wanted = re.compile(pattern)
    return ((path, _tree(path)) for path, source in _sources().items() if wanted.search(source))


@cache
def _hint_positions() -> dict[str, set[int]]:
    """By function or class: the positions of its parameter or field `hint`."""
    positions = defaultdict[str, set[int]](set)
    for _, tree in _trees("hint"):
        methods = set[ast.FunctionDef]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                names = [each.id for each in fields if isinstance(each, ast.Name)]
                if "hint" in names:
                    positions[node.name].add(names.index("hint"))
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        methods.add(method)
                        name = node.name if method.name == "__init__" else method.name
                        positions[name] |= _position(method, bound=True)
            elif isinstance(node, ast.FunctionDef) and node not in methods:
                positions[node.name] |= _position(node, bound=False)
    return {name: at for name, at in positions.items() if at and name not in CAPTIONS}


def _may_have_hints() -> str:
    """A pattern of the sources that may give a hint: by its name, or by position."""
    return rf"hint|\b(?:{'|'.join(map(re.escape, _hint_positions()))})\b"


def _position(function: ast.FunctionDef, *, bound: bool) -> set[int]:
    names = [each.arg for each in function.args.args][bound:]
    return {names.index("hint")} if "hint" in names else set()


def _hints(tree: ast.Module) -> Iterator[ast.expr]:
    positions = _hint_positions()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in CAPTIONS or (name == "error" and ast.unparse(node.func) == "messages.error"):
                continue
            given = [each for each in positions.get(name, ()) if each < len(node.args)]
            if given and not any(isinstance(each, ast.Starred) for each in node.args):
                yield node.args[max(given)]
            yield from (each.value for each in node.keywords if each.arg == "hint")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "hint":
                    yield value
        elif isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == "hint" for each in node.targets
        ):
            yield node.value


def _texts(node: ast.expr) -> Iterator[tuple[int, str]]:
    """`(line, text)` of the literals that an expression may give; `{}` for a placeholder."""
    if isinstance(node, ast.IfExp):
        yield from (*_texts(node.body), *_texts(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _texts(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        yield from _texts(node.left)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("_", "gettext"):
        yield from _texts(node.args[0])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
        yield node.lineno, "".join(map(str, parts))


def is_sentence(hint: str) -> bool:
    """Whether a hint starts with a capital letter and ends with a full stop."""
    return not hint or (bool(_START.match(hint)) and hint.endswith("."))


@pytest.mark.parametrize("folder", FOLDERS)
def test_hints_are_sentences(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, tree in _trees(_may_have_hints())
        if path.is_relative_to(ROOT / folder)
        for hint in _hints(tree)
        for line, text in _texts(hint)
        if not is_sentence(text)
    ]
    assert wrong == []


def test_errors_introduce_no_hint_by_try() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path, tree in _trees(r"\btry\b(?! *:)")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search("; try (?!again)", node.value)
    ]
    assert wrong == []


def test_the_check_detects_phrases() -> None:
    assert is_sentence("Use tp 2.") and is_sentence("")
    assert not is_sentence("tp 2") and not is_sentence("use tp 2.") and not is_sentence("Use tp 2")
    source = 'raise Refused("tp is 3", f"tp {near}" if near else _("Use 1"))'
    texts = [text for hint in _hints(ast.parse(source)) for _, text in _texts(hint)]
    assert texts == ["tp {}", "Use 1"]
