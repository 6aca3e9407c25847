"""The program of a script's order is unpacked per attempt; the original may change or vanish."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.workers.launcher.harness import Node
from workers.contracts.wire.node_messages import LaunchOrder
from workers.contracts.wire.programs.program_files import (
    ProgramFile,
    ProgramFiles,
    ProgramOrder,
)
from workers.launcher import command
from workers.launcher.isolation import containers, start
from workers.launcher.programs.unpack import unpack_program
from workers.launcher.rundir import RunDir

TRAIN = (
    "import os, part\n"
    "print('value', part.x, open('tokens.txt').read().strip(), os.environ['ORRERY_COMMIT'])\n"
    "open('written', 'w').write('here')\n"
)


def packed(files: dict[str, ProgramFile], folder: Path, **more: Any) -> dict[str, Any]:
    program = ProgramFiles(files=files)
    return {
        "packed": ProgramOrder.text_of(program.packed()),
        "fingerprint": program.fingerprint,
        "folder": str(folder),
        **more,
    }


def project(folder: Path) -> dict[str, Any]:
    """The order's program and, in the folder, its data and a later version of the program."""
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "tokens.txt").write_text("tokens")
    (folder / "src" / "part.py").write_text("x = 'later'\n")
    files = {
        "src/train.py": ProgramFile.of(TRAIN.encode()),
        "src/part.py": ProgramFile.of(b"x = 'submitted'\n"),
        "src/same.py": ProgramFile(link="part.py"),
        "src/tool": ProgramFile.of(b"#!/bin/sh\n\xff", executable=True),
    }
    originals = ["src/tokens.txt", "src/missing", "other/data"]
    return packed(files, folder, start="src", originals=originals, commit="c0ffee")


def order(program: dict[str, Any], script: dict[str, Any], **more: Any) -> LaunchOrder:
    spec = {"kind": "script", "script": script, "resources": more.pop("resources", {})}
    return LaunchOrder.from_dict(
        {
            **{"run": "7", "kind": "script", "attempt": 1, "attempt_id": "9", "fence": "f0"},
            **{"spec": spec, "local_devices": [0], "local_ranks": 1, "world_size": 1},
            **{"run_dir": "runs/7/attempt-1", "program": program, **more},
        }
    )


def folder_of(home: Path) -> RunDir:
    run_dir = RunDir(home / "runs" / "7" / "attempt-1")
    run_dir.path.mkdir(parents=True)
    return run_dir


@pytest.mark.flow
def test_an_attempt_runs_the_program_of_the_submit(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    program = project(folder)
    workdir = str(folder / "src")
    wanted = {**node.order(["train.py"], ranks=1), "program": program}
    wanted["spec"]["script"]["workdir"] = workdir
    run_dir = node.launch(wanted)
    assert node.exited(wanted)["class"] == "ok"
    assert "value submitted tokens c0ffee" in node.lines(0)
    assert (run_dir.path / "code" / "src" / "written").read_text() == "here"
    assert not (folder / "src" / "written").exists()


def test_unpacking(tmp_path: Path) -> None:
    wanted = order(project(tmp_path / "project"), {"command": ["train.py"]})
    run_dir = folder_of(tmp_path)
    start.unpack(wanted, run_dir)
    code = run_dir.path / "code" / "src"
    assert (code / "same.py").read_text() == "x = 'submitted'\n"
    assert os.access(code / "tool", os.X_OK) and (code / "tool").read_bytes().endswith(b"\xff")
    assert os.readlink(code / "tokens.txt") == str(tmp_path / "project" / "src" / "tokens.txt")
    assert not os.path.lexists(code / "missing")
    (code / "train.py").write_text("changed by a rank")
    unpack_program(wanted, run_dir)  # once per attempt
    assert (code / "train.py").read_text() == "changed by a rank"
    assert command.program(wanted, run_dir)[1] == code
    # a path into the original folder means the copy
    absolute = order(
        project(tmp_path / "second"), {"command": [str(tmp_path / "second" / "src" / "train.py")]}
    )
    assert command.program(absolute, run_dir)[0][-1] == str(code / "train.py")


def test_a_node_without_the_folder_runs_it_too(tmp_path: Path) -> None:
    program = project(tmp_path / "project")
    shutil.rmtree(tmp_path / "project")
    workdir = str(tmp_path / "project" / "src")
    wanted = order(program, {"command": ["train.py"], "workdir": workdir})
    run_dir = folder_of(tmp_path)
    start.unpack(wanted, run_dir)
    start.check(wanted, run_dir)


def test_a_container_sees_the_originals(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    wanted = order(project(folder), {"command": ["train.py"]}, resources={"image": "a"})
    run_dir = folder_of(tmp_path)
    start.unpack(wanted, run_dir)
    mounts = containers.mounts_of(wanted, tmp_path, tmp_path, run_dir.path / "code" / "src")
    assert containers.Mount(folder, writable=True) in mounts


def test_damaged_programs_are_refused(tmp_path: Path) -> None:
    good = project(tmp_path / "project")
    run_dir = folder_of(tmp_path)
    for wrong, message in (
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"packed": "%%"}, "cannot be used"),
        ({"packed": good["packed"][:40]}, "cannot be used"),
    ):
        with pytest.raises(start.NotSupported, match=message):
            start.unpack(order({**good, **wrong}, {"command": ["train.py"]}), run_dir)
    for names in ({"originals": ["../x"]}, {"start": "/etc"}, {"originals": ["a/../../b"]}):
        with pytest.raises(ValueError, match="not a name below"):
            order({**good, **names}, {"command": ["train.py"]})
    for files in (
        {"../a": ProgramFile.of(b"")},
        {"/a": ProgramFile.of(b"")},
        {"a": ProgramFile(link="../b")},
        {"a": ProgramFile.of(b""), "a/b": ProgramFile.of(b"")},
    ):
        with pytest.raises(ValueError, match=r"program's folder|file and a folder"):
            ProgramFiles(files=files)
