"""Packages of script runs: by lock file and by module, built once, with reasons for failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.workers.launcher.harness import Node
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.command import Unlaunchable
from workers.launcher.isolation import start
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.programs import environment, prepare_environment
from workers.launcher.rundir import RunDir

PROGRAM = """
import os, sys, torch, small
print("small", small.version, "flag", os.environ.get("SMALL_FLAG"))
print("prefix", sys.prefix == os.environ.get("VIRTUAL_ENV"), os.environ.get("VIRTUAL_ENV"))
"""


def wheel(folder: Path, version: str) -> None:
    """A package of one file that holds its version."""
    folder.mkdir(exist_ok=True)
    facts = f"small-{version}.dist-info"
    with zipfile.ZipFile(folder / f"small-{version}-py3-none-any.whl", "w") as file:
        file.writestr("small.py", f"version = {version!r}\n")
        file.writestr(
            f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: small\nVersion: {version}\n"
        )
        file.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{facts}/RECORD", f"small.py,,\n{facts}/METADATA,,\n{facts}/WHEEL,,\n")


def project(folder: Path) -> Path:
    """A work folder with a program; wheels of two versions."""
    work = folder / "project"
    work.mkdir()
    for version in ("1.0", "2.0"):
        wheel(folder / "wheels", version)
    (work / "train.py").write_text(PROGRAM)
    return work


def order_of(node: Node, work: Path, wanted: dict[str, Any], run: str = "7") -> dict[str, Any]:
    order = node.order(["train.py"], ranks=1, run=run)
    env = {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(work.parent / "wheels"), "UV_NO_INDEX": "1"}
    order["spec"]["script"] |= {"workdir": str(work), "environment": wanted, "env": env}
    return order


def output(run_dir: RunDir) -> str:
    return (run_dir.rank(0) / "stdout.log").read_text()


@pytest.mark.flow
def test_a_lock_is_installed_once_and_used_again(node: Node, tmp_path: Path) -> None:
    work = project(tmp_path)
    (work / "requirements.txt").write_text("small==1.0\n")
    first = node.launch(order_of(node, work, {"lock": "requirements.txt"}))
    assert node.reported("exited")["class"] == "ok"
    assert "small 1.0" in output(first) and "prefix True" in output(first)
    event = node.reported("event")
    assert event["type"] == "environment_prepared"
    assert event["data"]["built"] and event["data"]["packages"] == ["small==1.0"]

    plan = prepared(work, {"lock": "requirements.txt"}, node.home)
    code, text, report = run(plan, work, PROGRAM, **offline(tmp_path))
    assert code == 0 and not report["built"] and text == output(first)

    node.reports.clear()
    (work / "requirements.txt").write_text("small==3.0\n")
    node.launch(order_of(node, work, {"lock": "requirements.txt"}, run="9"))
    exited = node.reported("exited")
    assert exited["class"] == "user_error" and "small==3.0" in exited["reason"]


def prepared(
    work: Path, wanted: dict[str, Any], home: Path, user: RunUser | None = None
) -> environment.PreparedEnvironment:
    run_dir = RunDir(home / "runs" / "7" / "attempt-1")
    run_dir.path.mkdir(parents=True, exist_ok=True)
    spec = environment.ScriptEnvironment.from_dict(wanted)
    return environment.plan_environment(spec, run_dir, work_folder=work, home=home, user=user)


def run(
    plan: environment.PreparedEnvironment, folder: Path, code: str = "pass", **env: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and report of a Python program in the environment."""
    done = subprocess.run(
        plan.wrapped([plan.python, "-c", code]),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    report = Path(plan.request["report"])
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text())


def offline(tmp_path: Path) -> dict[str, str]:
    return {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tmp_path / "wheels")}


def test_uv_lock_installs_its_versions_and_torch_may_come_from_the_node(tmp_path: Path) -> None:
    work = project(tmp_path)
    text = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\n'
    (work / "pyproject.toml").write_text(f'{text}dependencies = ["small<2"]\n')
    uv = [str(Path(sys.executable).parent / "uv"), "lock", "--quiet"]
    subprocess.run(uv, cwd=work, env={**os.environ, **offline(tmp_path)}, check=True)
    plan = prepared(work, {"lock": "uv.lock"}, tmp_path / "home")
    code, text, report = run(plan, work, PROGRAM, **offline(tmp_path))
    assert code == 0 and "small 1.0" in text, text
    assert report["packages"] == ["small==1.0"] and report["built"]

    alone = prepared(work, {"lock": "uv.lock", "node_packages": False}, tmp_path / "home")
    assert alone.request["folder"] != plan.request["folder"]
    code, _, report = run(alone, work, **offline(tmp_path))
    assert code == 64 and report["class"] == "user_error" and "no torch" in report["reason"]


def test_an_interrupted_build_is_repeated(tmp_path: Path) -> None:
    work = project(tmp_path)
    (work / "requirements.txt").write_text("small\n")
    plan = prepared(work, {"lock": "requirements.txt"}, tmp_path / "home")
    half = Path(plan.request["folder"])
    half.mkdir(parents=True)
    (half / "rest").write_text("of a killed build")
    code, _, report = run(plan, work, **offline(tmp_path))
    assert code == 0 and report["packages"] == ["small==2.0"]
    assert not (half / "rest").exists()


def test_unused_environments_are_deleted_and_used_ones_stay(tmp_path: Path) -> None:
    work = project(tmp_path)
    folders = []
    for version in ("1.0", "2.0"):
        (work / "requirements.txt").write_text(f"small=={version}\n")
        plan = prepared(work, {"lock": "requirements.txt"}, tmp_path / "home")
        run(plan, work, **offline(tmp_path))
        folders.append(Path(plan.request["folder"]))
    used, unused = folders
    for folder in folders:
        os.utime(folder / "complete.json", (1, 1))
    ready, wait = tmp_path / "ready", "import pathlib, sys; pathlib.Path('ready').touch(); input()"
    (work / "requirements.txt").write_text("small==1.0\n")
    plan = prepared(work, {"lock": "requirements.txt"}, tmp_path / "home")
    env = {**os.environ, **offline(tmp_path)}
    words = plan.wrapped([plan.python, "-c", wait])
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=env, cwd=tmp_path) as program:
        while not ready.exists():
            time.sleep(0.01)
        os.utime(used / "complete.json", (1, 1))  # started long ago
        (work / "requirements.txt").write_text("small\n")
        new = prepared(work, {"lock": "requirements.txt"}, tmp_path / "home")
        assert run(new, work, **offline(tmp_path))[0] == 0
        assert used.is_dir() and not unused.exists()
        program.communicate(b"\n")


@pytest.mark.parametrize(
    ("lock", "env", "exit_class", "reason"),
    [
        ("small==1.0 --hash=sha256:" + "0" * 64, {}, "user_error", "ash mismatch"),
        ("not a requirement ~", {}, "user_error", "requirements.txt"),
        (
            "small==1.0",
            {
                "UV_OFFLINE": "0",
                "UV_NO_INDEX": "0",
                "UV_HTTP_RETRIES": "0",
                "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple",
            },
            "infrastructure",
            "127.0.0.1:9",
        ),
    ],
)
def test_failures_have_a_class_and_a_reason(
    tmp_path: Path, lock: str, env: dict[str, str], exit_class: str, reason: str
) -> None:
    work = project(tmp_path)
    (work / "requirements.txt").write_text(lock + "\n")
    plan = prepared(work, {"lock": "requirements.txt"}, tmp_path / "home")
    links = {} if "UV_DEFAULT_INDEX" in env else offline(tmp_path)
    code, text, report = run(plan, work, **{**links, **env})
    assert (code, report["state"]) == (prepare_environment.CODES[exit_class], "failed"), text
    assert report["class"] == exit_class and reason in report["reason"], report


def test_modules_set_variables_and_give_the_python(tmp_path: Path) -> None:
    files = tmp_path / "modulefiles"
    (files / "small").mkdir(parents=True)
    python = tmp_path / "tools" / "python3.99"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (files / "small" / "2.1").write_text(
        f"#%Module\nsetenv SMALL_FLAG yes\nsetenv ORRERY_RUN 1\nprepend-path PATH {python.parent}\n"
    )
    wanted = {"modules": ["small/2.1"], "python": "python3.99"}
    plan = prepared(tmp_path, wanted, tmp_path / "home")
    show = "import os, sys; print(os.environ['SMALL_FLAG'], os.environ['ORRERY_RUN'])"
    code, text, report = run(plan, tmp_path, show, MODULEPATH=str(files), ORRERY_RUN="7")
    assert code == 0 and "yes 7" in text, text
    assert report["modules"] == ["small/2.1"]

    missing = prepared(tmp_path, {"modules": ["large/1"]}, tmp_path / "home")
    code, _, report = run(missing, tmp_path, MODULEPATH=str(files))
    assert code == 64 and report["class"] == "user_error" and "large/1" in report["reason"]


def test_a_node_without_modules_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = tmp_path / "bash"
    shell.write_text('#!/bin/sh\nunset -f module\nexec /bin/bash --noprofile --norc -c "$2" "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("BASH_ENV", raising=False)
    code, _, report = run(prepared(tmp_path, {"modules": ["cuda"]}, tmp_path), tmp_path)
    assert code == 69 and "no environment modules" in report["reason"]


def test_environments_of_users_are_apart(tmp_path: Path) -> None:
    work = project(tmp_path)
    (work / "requirements.txt").write_text("small\n")
    user = RunUser(1_880_000_001, 1_880_000_001, "orrery-1", (), 1_900_000_007)
    wanted = {"lock": "requirements.txt"}
    shared, own = prepared(work, wanted, tmp_path), prepared(work, wanted, tmp_path, user)
    assert Path(own.python).is_relative_to(tmp_path / "users" / str(user.uid))
    assert shared.request["fingerprint"] == own.request["fingerprint"]
    (work / "requirements.txt").write_text("small==2.0\n")
    assert prepared(work, wanted, tmp_path).python != shared.python


def test_a_lock_that_is_not_there_is_refused(tmp_path: Path) -> None:
    script = {"command": ["-m", "x"], "workdir": str(tmp_path)}
    script |= {"environment": {"lock": "uv.lock"}}  # type: ignore[dict-item]
    order = LaunchOrder.from_dict(
        {
            **{"run": "7", "kind": "script", "attempt": 1, "attempt_id": "9", "fence": "f0"},
            **{"spec": {"kind": "script", "script": script}, "local_devices": [0]},
            **{"local_ranks": 1, "world_size": 1, "run_dir": "runs/7/attempt-1"},
        }
    )
    run_dir = RunDir(tmp_path / "runs" / "7" / "attempt-1")
    where = {"host": "h", "port": 1, "address": "a", "local_address": "a"}
    with pytest.raises(Unlaunchable, match=r"uv\.lock cannot be read on this node"):
        start.prepare(order, run_dir, None, secrets={}, **where)  # type: ignore[arg-type]
