"""READMEs of packages: one form, and a list of files that matches the folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["Purpose", "Design", "Guarantees", "Limits", "Files"]
READMES = sorted(
    page
    for name in ("orchestrator", "webui", "workers", "kernels", "deploy/cli")
    for page in (ROOT / name).rglob("README.md")
)
# what every Django app or program has; a list may name them
UNLISTED = {"__init__.py", "__main__.py", "apps.py", "admin.py", "migrations", "management"}


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_readme_has_the_five_parts_in_order(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    assert [each for each in headings if each in PARTS] == PARTS


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_listed_files_exist_and_all_files_are_listed(page: Path) -> None:
    folder = _package(page)
    listed, wrong = _listed(page.read_text().partition("## Files")[2], folder)
    assert not wrong, f"{wrong} do not exist"
    children = {
        path.name
        for path in folder.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("**/*.py")))
    }
    missing = sorted(children - UNLISTED - {path.relative_to(folder).parts[0] for path in listed})
    assert not missing, f"{missing} are not listed"


def test_paths_of_the_code_map_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tops = "orchestrator|webui|workers|kernels|deploy|tools|tests|docs"
    for name in re.findall(rf"`((?:{tops})/[^`<\s]*)`", text):
        for path in _alternatives(name):
            assert (ROOT / path).exists(), path


def _package(page: Path) -> Path:
    """The folder that a README describes; that of the command is above its package."""
    package = page.parent / "orrery_cli"
    return package if package.is_dir() else page.parent


def _listed(text: str, folder: Path) -> tuple[set[Path], list[str]]:
    """The files and folders that a list names, and the names that do not exist.

    In a table the first column names files, relative to the folder or to an earlier path of the
    row; the second may name more of them as `*.py`.
    """
    listed: set[Path] = set()
    wrong: list[str] = []
    for line in text.splitlines():
        columns = line.strip("|").split("|") if line.startswith("|") else ["", line]
        bases = [folder]
        for column, cell in enumerate(columns):
            for name in re.findall(r"`([^`\s]+)`", cell):
                if column and not name.endswith(".py"):
                    continue
                paths = _resolve(name, bases)
                listed |= paths
                wrong += [] if paths else [name]
                bases += [each if each.is_dir() else each.parent for each in sorted(paths)]
    return listed, wrong


def _resolve(name: str, bases: list[Path]) -> set[Path]:
    for base in reversed(bases):
        for pattern in (name, f"{name}.py"):
            paths = set(base.glob(pattern.rstrip("/")))
            if paths:
                return paths
    return set()


def _alternatives(name: str) -> list[str]:
    """`a/{b,c}.py` is `a/b.py` and `a/c.py`."""
    match = re.search(r"\{([^}]*)\}", name)
    if match is None:
        return [name]
    return [name.replace(match[0], each) for each in match[1].split(",")]
