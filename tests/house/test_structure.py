"""Structure of the packages: no import cycles, few files per package, documented functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import grimp
import networkx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("orchestrator", "webui", "workers", "kernels")
MOST_FILES = 14
# packages of one kind of thing: one REST resource, tab, chart or GPU case per file
ONE_PER_FILE = {"orchestrator/api", "webui/tabs", "webui/charts", "kernels/gpu"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    sys.path.insert(0, str(ROOT))
    try:
        return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.remove(str(ROOT))


def test_no_import_cycles(graph: grimp.ImportGraph) -> None:
    """Also inside packages, and through imports inside functions."""
    edges = networkx.DiGraph()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            edges.add_edge(module, imported)
    cycles = [
        sorted(each) for each in networkx.strongly_connected_components(edges) if len(each) > 1
    ]
    assert not cycles, "\n".join(", ".join(cycle) for cycle in cycles)


def test_packages_hold_few_files() -> None:
    crowded = []
    for folder in sorted(
        {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    ):
        name = str(folder.relative_to(ROOT))
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(files) > MOST_FILES and name not in ONE_PER_FILE and "migrations" not in name:
            crowded.append(f"{name}: {len(files)} files, at most {MOST_FILES}")
    assert not crowded, "\n".join(crowded)


def test_every_package_has_a_description() -> None:
    """A README or, for a small package, a docstring in `__init__.py`."""
    undocumented = []
    for name in PACKAGES:
        for init in (ROOT / name).rglob("__init__.py"):
            folder = init.parent
            if {"migrations", "management", "commands"} & set(folder.parts):
                continue
            if not init.read_text().strip() and not (folder / "README.md").exists():
                undocumented.append(str(folder.relative_to(ROOT)))
    assert not undocumented, undocumented


def test_public_functions_have_docstrings() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "check", "--no-cache", "--select", "D101,D102,D103", *PACKAGES]
    done = subprocess.run(
        [*command, "--output-format", "concise"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_formatting_is_left_to_the_formatter() -> None:
    """At most one data table uses `fmt: skip`."""
    skipping = [
        str(path.relative_to(ROOT))
        for name in (*PACKAGES, "tests", "tools")
        for path in (ROOT / name).rglob("*.py")
        if path != Path(__file__) and "fmt: skip" in path.read_text()
    ]
    assert len(skipping) <= 1, skipping


# files that assign a `forward`, with the reason; everything else swaps the module (`wrapped`)
FORWARD_ASSIGNMENTS = {
    "workers/inference/cpu/matmul.py": "layers whose weights are fused share one packed product",
    "workers/inference/runner.py": "the newest cache's runner replaces an earlier one's attention",
}


def test_no_forward_method_is_replaced() -> None:
    """`module.forward = …`, `setattr(module, "forward", …)` and `module.__class__ = …`."""
    matches = set()
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            source = path.read_text()
            if "forward" not in source and "__class__" not in source:
                continue
            if any(_replaces_forward(node) for node in ast.walk(ast.parse(source))):
                matches.add(str(path.relative_to(ROOT)))
    assert matches == FORWARD_ASSIGNMENTS.keys()


@pytest.mark.parametrize(
    "code",
    [
        "a.forward = b",
        "a.forward: Any = b",
        "x = a.b.forward = c",
        "(a.forward, c) = d",
        "setattr(a, 'forward', b)",
        "a.__class__ = B",
        "object.__setattr__(a, 'forward', b)",
    ],
)
def test_each_way_to_replace_a_forward_method_is_seen(code: str) -> None:
    assert any(_replaces_forward(node) for node in ast.walk(ast.parse(code)))


def _replaces_forward(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr in ("forward", "__class__")
    if not isinstance(node, ast.Call) or len(node.args) < 3:
        return False
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    name = node.args[1]
    return called in ("setattr", "__setattr__") and (
        isinstance(name, ast.Constant) and name.value == "forward"
    )


def test_triggers_have_no_filters() -> None:
    """htmx compiles a filter by `eval`, which the content security policy refuses."""
    for path in (ROOT / "webui/templates").rglob("*.html"):
        for trigger in re.findall(r'hx-trigger="([^"]*)"', path.read_text()):
            assert "[" not in trigger, f"{path.name}: {trigger}"
