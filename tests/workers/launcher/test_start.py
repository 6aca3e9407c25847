"""The built command lines of users, limits and container images; none of them runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.agent import isolation
from workers.contracts.wire.node_messages import LIMITS_OF_IMAGES, LaunchOrder, supported
from workers.launcher import command
from workers.launcher.isolation import containers, limits, start
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.rundir import RunDir

USER = RunUser(1_880_000_005, 1_880_000_005, "orrery-5", (1_900_000_007, 1_900_000_003), 5)
IMAGE = "nvcr.io/nvidia/pytorch:25.06-py3"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's home; this machine has neither runtime nor systemd unless a test says so."""
    for name in ("data", "models", "runs/3", "runs/7/attempt-1", f"users/{USER.uid}"):
        (tmp_path / name).mkdir(parents=True)
    for name in (containers.CHOSEN, start.LIMITS_VARIABLE, "ORRERY_DATA_ROOTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(containers, "_CDI", ())
    monkeypatch.setattr(containers, "_INFINIBAND", tmp_path / "missing")
    monkeypatch.setattr(containers, "_program", lambda name: f"/usr/bin/{name}")
    return tmp_path


def order(home: Path, *, resources: dict[str, Any] | None = None, **more: Any) -> LaunchOrder:
    body = {"command": ["train.py"], "env": more.pop("env", {})}
    spec = {"kind": "script", "script": body, "resources": resources or {}}
    return LaunchOrder.from_dict(
        {
            **{"run": "7", "kind": "script", "attempt": 1, "attempt_id": "9", "fence": "f0"},
            **{"spec": spec, "local_devices": [2, 3], "local_ranks": 2, "world_size": 2},
            **{"run_dir": "runs/7/attempt-1", "reads": ["3"], **more},
        }
    )


def prepared(home: Path, wanted: LaunchOrder, user: RunUser | None = USER) -> start.Start:
    run_dir = RunDir(home / wanted.run_dir)
    (run_dir.path / "train.py").write_text("")
    start.check(wanted, run_dir)
    return start.prepare(
        wanted,
        run_dir,
        user,
        host="10.0.0.1",
        port=29400,
        address="10.0.0.1",
        local_address="10.0.0.1",
        secrets={"HF_TOKEN": "hush"},
    )


def test_variables_of_a_submitter_reach_no_program_that_is_root(home: Path) -> None:
    """setpriv, systemd-run and docker start as root, and LD_PRELOAD would be theirs."""
    for resources in ({}, {"image": IMAGE}, {"memory_gb": 1.0}, {"image": IMAGE, "cpus": 2.0}):
        for runtime in containers.RUNTIMES:
            os.environ[containers.CHOSEN] = runtime
            os.environ[start.LIMITS_VARIABLE] = "systemd"
            try:
                wanted = order(home, resources=resources, env={"LD_PRELOAD": "/x.so", "A": "b"})
                made = prepared(home, wanted)
            finally:
                del os.environ[containers.CHOSEN], os.environ[start.LIMITS_VARIABLE]
            assert not {"LD_PRELOAD", "A", "HF_TOKEN"} & made.env.keys()
            assert not any("hush" in word or "/x.so" in word for word in made.arguments)
            assert made.stdin is not None
            inner = json.loads(made.stdin)["env"]
            assert inner["LD_PRELOAD"] == "/x.so" and inner["HF_TOKEN"] == "hush"
            assert inner["ORRERY_FENCE"] == "f0"


def test_a_user_gets_the_environment_from_standard_input(home: Path) -> None:
    made = prepared(home, order(home))
    at = made.arguments.index(str(containers.ENTRY))
    assert made.arguments[at - 3 : at] == [sys.executable, "-S", "-E"]
    assert made.arguments[at + 1 : at + 4] == [sys.executable, "-c", command.TORCHRUN]
    assert Path(made.arguments[0]).name == "setpriv" and not made.group
    # the program itself, without the change of the user
    probe = "import os, sys; print(os.environ['B'], os.umask(0), sys.stdin.read())"
    words = containers.entered([sys.executable, "-c", probe], sys.executable)
    sent = containers.start_input({"B": "ü\nz"}, umask=0o027)
    done = subprocess.run(words, input=sent, capture_output=True, env={}, timeout=120)
    assert done.stdout.decode() == f"ü\nz {0o027} \n", done.stderr


def test_limits_by_systemd(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = order(home, resources={"memory_gb": 24.5, "cpus": 3.5, "processes": 500})
    with pytest.raises(start.NotSupported, match="cannot limit memory"):
        prepared(home, wanted)
    monkeypatch.setenv(start.LIMITS_VARIABLE, "systemd")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    made = prepared(home, wanted)
    end = made.arguments.index("--")
    assert made.arguments[:end][1:] == [
        *("--scope", "--quiet", "--collect", "--unit=orrery-f0-0", "--slice=orrery-runs"),
        *("--property=OOMPolicy=continue", "--property=MemoryMax=24500000000"),
        *("--property=MemorySwapMax=0", "--property=CPUQuota=350%", "--property=TasksMax=500"),
    ]
    assert Path(made.arguments[end + 1]).name == "setpriv" and made.group
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    made = prepared(home, order(home, resources={"cpus": 1}), user=None)
    assert made.arguments[1] == "--user" and "--property=CPUQuota=100%" in made.arguments
    assert not any("MemoryMax" in word or "TasksMax" in word for word in made.arguments)


def test_docker(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(containers.CHOSEN, "docker")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    resources = {"image": IMAGE, "memory_gb": 8, "cpus": 2.5, "processes": 64}
    made = prepared(home, order(home, resources=resources, device_kind="gpu"))
    words = made.arguments
    at = words.index(IMAGE)
    assert words[:5] == ["/usr/bin/docker", "run", "--rm", "--interactive", "--sig-proxy=false"]
    for option in (
        "--name=orrery-f0-0",
        f"--user={USER.uid}:{USER.gid}",
        *(f"--group-add={group}" for group in USER.groups),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--network=host", "--ipc=host", "--pid=host"),
        *("--memory=8000000000b", "--memory-swap=8000000000b", "--cpus=2.5", "--pids-limit=64"),
        '--gpus="device=2,3"',
        f"--mount=type=bind,source={home}/runs/7,target={home}/runs/7",
        f"--mount=type=bind,source={home}/runs/3,target={home}/runs/3,readonly",
        f"--mount=type=bind,source={home}/data,target={home}/data,readonly",
        f"--mount=type=bind,source={home}/users/{USER.uid},target={home}/users/{USER.uid}",
        f"--mount=type=bind,source={command.ROOT},target={command.ROOT},readonly",
        f"--workdir={home}/runs/7/attempt-1",
        "--entrypoint=python3",
    ):
        assert option in words[:at], option
    assert words[at + 1 : at + 7] == [
        *("-S", "-E", str(containers.ENTRY), "python3", "-c", command.TORCHRUN)
    ]
    assert sys.executable not in words, "the image has its own Python"
    assert made.stdin is not None and made.group
    inner = json.loads(made.stdin)["env"]
    assert inner["CUDA_VISIBLE_DEVICES"] == "0,1" and inner["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "PATH" not in inner and inner["HOME"] == str(home / "users" / str(USER.uid))
    monkeypatch.setattr(containers, "_CDI", (home,))
    words = prepared(home, order(home, resources=resources, device_kind="gpu")).arguments
    assert {"--device=nvidia.com/gpu=2", "--device=nvidia.com/gpu=3"} <= set(words)
    words = prepared(home, order(home, resources={"image": IMAGE})).arguments
    assert not any("gpu" in word or "--memory" in word for word in words)
    with pytest.raises(start.NotSupported, match="Docker but not Apptainer"):
        prepared(home, order(home, resources={"image": "x.sif"}))


def test_apptainer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(containers.CHOSEN, "apptainer")
    monkeypatch.setenv(start.LIMITS_VARIABLE, "systemd")
    resources = {"image": IMAGE, "memory_gb": 8}
    made = prepared(home, order(home, resources=resources, device_kind="gpu"))
    words = made.arguments
    scope, user, runtime = (
        next(i for i, word in enumerate(words) if Path(word).name == name)
        for name in ("systemd-run", "setpriv", "apptainer")
    )
    assert scope < user < runtime
    at = words.index(f"docker://{IMAGE}")
    assert words[runtime + 1 : runtime + 5] == ["exec", "--cleanenv", "--no-mount=home,cwd", "--nv"]
    assert f"--bind={home}/runs/7:{home}/runs/7:rw" in words[:at]
    assert f"--bind={home}/data:{home}/data:ro" in words[:at]
    assert words[at + 1 : at + 5] == ["python3", "-S", "-E", str(containers.ENTRY)]
    assert made.stdin is not None
    assert json.loads(made.stdin)["env"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(command.Unlaunchable, match="there is no file"):
        prepared(home, order(home, resources={"image": "x.sif"}))
    (home / "x.sif").write_text("")
    assert (
        str(home / "x.sif") in prepared(home, order(home, resources={"image": "x.sif"})).arguments
    )


def test_folders_that_options_cannot_express_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(containers.CHOSEN, "docker")
    evil = home / "data" / "a,source=" / "etc"
    evil.mkdir(parents=True)
    wanted = order(home, resources={"image": IMAGE})
    wanted.spec["script"]["workdir"] = str(evil)
    with pytest.raises(command.Unlaunchable, match="cannot be mounted"):
        prepared(home, wanted)
    wanted.spec["script"]["workdir"] = str(home / "data" / "in-the-image")
    assert f"--workdir={home}/data/in-the-image" in prepared(home, wanted).arguments


def test_a_node_without_a_runtime_refuses_an_image(home: Path) -> None:
    with pytest.raises(start.NotSupported, match="neither Docker nor Apptainer"):
        prepared(home, order(home, resources={"image": IMAGE}))


@pytest.mark.parametrize(
    ("installed", "scopes", "container", "limited"),
    [
        ({}, False, None, None),
        ({"docker": "27.1.1"}, False, "docker 27.1.1", LIMITS_OF_IMAGES),
        ({"apptainer": "apptainer version 1.3.4"}, True, "apptainer 1.3.4", limits.METHOD),
        ({"docker": ""}, True, None, limits.METHOD),
    ],
)
def test_the_inventory_names_what_is_installed(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    scopes: bool,
    container: str | None,
    limited: str | None,
) -> None:
    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = Path(words[0]).name
        if name == "systemd-run":
            return subprocess.CompletedProcess(words, int(not scopes), "", "")
        answer = installed.get(name)
        # docker without its daemon
        return subprocess.CompletedProcess(words, int(not answer), answer or "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv(containers.CHOSEN, "")
    monkeypatch.setenv(start.LIMITS_VARIABLE, "")
    report = isolation.choose(home, "agent").report
    assert (report.container, report.limits) == (container, limited)
    assert os.environ[containers.CHOSEN] == (container or "").split(" ")[0]
    assert ("images" in supported(container, limited)) == (container is not None)
    assert ("limits" in supported(container, limited)) == scopes
    monkeypatch.setenv(containers.SETTING, "podman")
    with pytest.raises(ValueError, match="docker, apptainer or none"):
        isolation.choose(home, "agent")


def test_a_container_that_was_left_behind_is_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: called.append(words))
    for runtime in containers.RUNTIMES:
        monkeypatch.setenv(containers.CHOSEN, runtime)
        containers.remove(order(home))
        containers.remove(order(home, resources={"image": IMAGE}, node_rank=1, nodes=2))
    assert called == [["/usr/bin/docker", "rm", "--force", "orrery-f0-1"]]
