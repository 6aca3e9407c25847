"""The command installs alone, starts fast, and imports nothing of Orrery's server."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import orrery_cli
import pytest

from tests.cli.conftest import Orrery

FOLDER = Path(orrery_cli.__file__).parent
PROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]


def test_it_imports_only_its_own_dependencies() -> None:
    allowed = {*sys.stdlib_module_names, "orrery_cli", "typer", "rich", "httpx"}
    assert {name.partition(">")[0] for name in PROJECT["dependencies"]} == {
        "typer",
        "rich",
        "httpx",
    }
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("from orrery_cli.main import run; run(['--version'])", {"typer", "httpx", "rich", "json"}),
        ("import orrery_cli.app", {"httpx", "rich"}),
    ],
    ids=["version", "commands"],
)
def test_libraries_are_imported_when_they_are_needed(code: str, absent: set[str]) -> None:
    probe = f"{code}\nimport sys; print(sorted({absent!r} & set(sys.modules)))"
    program = f"import sys; sys.path.insert(0, {str(FOLDER.parent)!r}); {probe}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_version_help_and_completion(run_command: Orrery) -> None:
    assert run_command("--version").out == f"orrery {orrery_cli.__version__}\n"
    shown = run_command("--help")
    assert shown.code == 0
    for name in ("login", "submit", "watch", "logs", "cancel", "compare", "download"):
        assert f" {name} " in shown.out
    assert "--install-completion" in shown.out


def test_an_unreachable_server_is_named(run_command: Orrery, monkeypatch: object) -> None:
    shown = run_command("--url", "http://127.0.0.1:9", "runs")
    assert shown.code == 1 and "cannot reach http://127.0.0.1:9" in shown.err
    assert "hint:" in shown.err and shown.out == ""
