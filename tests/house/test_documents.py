"""Documents are true: the commands, files and settings that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import get_commands

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "deploy", "examples", "orchestrator", "webui", "workers", "kernels", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), (
            f"{page.name} points at {target}, which is not there"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_documents_name_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in re.findall(r"`make ([a-z-]+)", text):
        assert name in targets, f"{page.name} names `make {name}`"
    commands = {"help", *get_commands()}
    for name in re.findall(r"manage\.py ([a-z_]+)", text):
        assert name in commands, f"{page.name} names `manage.py {name}`"
    for module in re.findall(r"python -m ((?:workers|tests|orchestrator)[\w.]*)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), (
            f"{page.name} names {module}"
        )


def test_named_tests_exist() -> None:
    """`folder/test_name`: the path of a test module below `tests/`."""
    named = {
        (page, path)
        for page in PAGES
        if page.name != "CHANGELOG.md"  # its tests may have been renamed since
        for path in re.findall(
            r"`(?:tests/)?([\w/]+/test_\w+)(?:\.py)?(?:::\w+)?`", page.read_text()
        )
    }
    missing = sorted(
        f"{page.relative_to(ROOT)} names {path}"
        for page, path in named
        if not (ROOT / "tests" / path).with_suffix(".py").exists()
    )
    assert not missing, "\n".join(missing)
    assert len(named) > 30


def test_make_lists_itself() -> None:
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in ("up", "test", "check", "install", "bench"):
        assert f"make {target}" in shown


def test_every_setting_that_code_reads_is_known() -> None:
    from orchestrator.config.env.read import OTHER_VARIABLES, variable
    from orchestrator.config.env.variables import Env

    known = {variable(name) for name in Env.model_fields} | OTHER_VARIABLES
    for path in [
        *ROOT.glob("orchestrator/**/*.py"),
        *ROOT.glob("workers/**/*.py"),
        *ROOT.glob("webui/**/*.py"),
    ]:
        for name in set(re.findall(r"\bORRERY_[A-Z_]+[A-Z]\b", path.read_text())):
            assert name in known or any(other.startswith(name) for other in known), (
                f"{path}: {name} is not a setting"
            )


def test_spec_reference_is_current_and_describes_every_field() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import spec_reference
    finally:
        sys.path.pop(0)
    text = spec_reference.text()
    assert (ROOT / "docs" / "spec.md").read_text() == text, "run: python tools/spec_reference.py"
    assert [line for line in text.splitlines() if line.endswith("|  |")] == []


def test_spec_descriptions_are_of_known_fields() -> None:
    from tools.spec_descriptions import DESCRIPTIONS

    text = (ROOT / "docs" / "spec.md").read_text()
    for name in DESCRIPTIONS:
        assert f"`{name.rpartition('.')[2]}`" in text, name
