"""The folder installs alone as `orrery-recorder` and needs only the standard library."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

from workers.recorder import orrery_recorder

FOLDER = Path(orrery_recorder.__file__).parent


def test_it_installs_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("__pycache__"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*install, "--target", str(target), str(source)], check=True, timeout=120)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import orrery_recorder, orrery_follow, "
        "orrery_lightning; "
        "run = orrery_recorder.init(name='x'); run.log({'loss': 1}); print(run.finish(), "
        "orrery_recorder.__file__)"
    )
    shown = subprocess.run(
        [sys.executable, "-I", "-c", code, str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.split() == ["True", str(target / "orrery_recorder.py")]


def test_it_imports_the_standard_library_only() -> None:
    tree = ast.parse(Path(orrery_recorder.__file__).read_text())
    names = [
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    ]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)
