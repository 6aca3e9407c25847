"""Command lines that start an attempt in a container image, by Docker or Apptainer.

The container shares the host's network, IPC and process ids: collectives use the network and
/dev/shm of the host, and the supervisor finds, signals and kills ranks by their process ids. Paths
are the same inside. Starts nothing except to detect and to remove containers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.isolation.limits import Limits
from workers.launcher.isolation.run_user import RunUser

PYTHON: Final = "python3"  # of the image
RUNTIMES: Final = ("docker", "apptainer")
ENTRY: Final = Path(__file__).resolve().with_name("entry.py")
SETTING: Final = "ORRERY_CONTAINER_RUNTIME"
CHOSEN: Final = "ORRERY_NODE_CONTAINERS"  # set by the agent for its supervisors
_SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/sbin"
_CDI: Final = (Path("/etc/cdi/nvidia.yaml"), Path("/var/run/cdi/nvidia.yaml"))
_INFINIBAND: Final = Path("/dev/infiniband")
# variables of the agent that tune communication or libraries; others are the host's own
_INHERITED: Final = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "ORRERY_NODE")
# what the client of the runtime needs; never variables of a submitter
_CLIENT: Final = (
    *("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"),
    *("DOCKER_HOST", "DOCKER_CONFIG"),
)


@dataclass(frozen=True)
class Runtime:
    """A runtime of this node: `name` is docker or apptainer."""

    name: str
    program: str


@dataclass(frozen=True)
class Mount:
    """A path of the host that the container has under the same name."""

    path: Path
    writable: bool = False


def detect(setting: str) -> tuple[Runtime, str] | None:
    """The runtime and its version; `setting` names one, "none", or is empty: the first that works.

    Raises ValueError for another setting, or if the named one does not work here.
    """
    wanted = setting.strip()
    if wanted == "none":
        return None
    if wanted not in ("", *RUNTIMES):
        raise ValueError(f"{SETTING} is {wanted!r}; set it to docker, apptainer or none.")
    for name in (wanted,) if wanted else RUNTIMES:
        if result := _works(name):
            return result
    if wanted:
        raise ValueError(f"{SETTING} is {wanted}, which does not work on this node.")
    return None


def chosen() -> Runtime | None:
    """The runtime that the agent detected."""
    name = os.environ.get(CHOSEN, "")
    program = _program(name) if name in RUNTIMES else None
    return None if program is None else Runtime(name, program)


def image_of(order: LaunchOrder) -> str | None:
    """The image that the order's spec names."""
    image = (order.spec.get("resources") or {}).get("image")
    return str(image) if image else None


def container_name(order: LaunchOrder) -> str:
    """The container of an attempt on one node, also after its supervisor died."""
    return f"orrery-{order.fence}-{order.node_rank}"


def inherited(base: Mapping[str, str]) -> dict[str, str]:
    """The variables of the agent that the programs of a container get."""
    return {name: value for name, value in base.items() if name.startswith(_INHERITED)}


def client_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of programs that may be root: nothing of the submitter's."""
    return {name: base[name] for name in _CLIENT if name in base}


def entered(command: Sequence[str], python: str) -> list[str]:
    """The command, which gets its environment from `start_input` on its standard input."""
    return [python, "-S", "-E", str(ENTRY), *command]


def start_input(env: Mapping[str, str], *, umask: int) -> bytes:
    """What `entry.py` reads from its standard input."""
    return json.dumps({"env": dict(env), "umask": umask}).encode()


def docker(
    runtime: Runtime,
    command: Sequence[str],
    *,
    image: str,
    name: str,
    user: RunUser | None,
    mounts: Iterable[Mount],
    workdir: Path,
    gpus: Sequence[int] = (),
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> list[str]:
    """`docker run` in the foreground; the container is removed when it ends.

    Its programs have no capabilities. `--sig-proxy=false`: the supervisor signals the processes
    themselves.
    """
    uid, gid = (user.uid, user.gid) if user is not None else (os.getuid(), os.getgid())
    words = [runtime.program, "run", "--rm", "--interactive", "--sig-proxy=false"]
    words += [f"--name={name}", f"--user={uid}:{gid}"]
    words += [f"--group-add={group}" for group in (user.groups if user is not None else ())]
    words += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
    words += ["--network=host", "--ipc=host", "--pid=host", "--log-driver=none"]
    words += ["--ulimit=memlock=-1:-1", "--ulimit=stack=67108864:67108864"]
    if limits.memory_bytes is not None:
        words += [f"--memory={limits.memory_bytes}b", f"--memory-swap={limits.memory_bytes}b"]
    if limits.cpus is not None:
        words.append(f"--cpus={limits.cpus:g}")
    if limits.processes is not None:
        words.append(f"--pids-limit={limits.processes}")
    if gpus:
        words += _docker_gpus(gpus)
        words += [f"--device={_INFINIBAND}"] if _INFINIBAND.exists() else []
    for mount in _outermost(mounts):
        option = f"--mount=type=bind,source={mount.path},target={mount.path}"
        words.append(option if mount.writable else f"{option},readonly")
    words += [f"--workdir={workdir}", f"--entrypoint={PYTHON}", image]
    return [*words, *entered(command, PYTHON)[1:]]


def apptainer(
    runtime: Runtime,
    command: Sequence[str],
    *,
    image: str,
    mounts: Iterable[Mount],
    workdir: Path,
    gpus: Sequence[int] = (),
) -> list[str]:
    """`apptainer exec` under the caller's user; it replaces itself by the program."""
    source = image if image.endswith(".sif") or "://" in image else f"docker://{image}"
    words = [runtime.program, "exec", "--cleanenv", "--no-mount=home,cwd"]
    words += ["--nv"] if gpus else []
    for mount in _outermost(mounts):
        words.append(f"--bind={mount.path}:{mount.path}:{'rw' if mount.writable else 'ro'}")
    words += [f"--pwd={workdir}", source]
    return [*words, *entered(command, PYTHON)]


def remove(order: LaunchOrder, *, before: Callable[[], None] | None = None) -> None:
    """Remove the attempt's container, if there is one; `before` runs in the child. Never raises."""
    runtime = chosen()
    if image_of(order) is None or runtime is None or runtime.name != "docker":
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [runtime.program, "rm", "--force", container_name(order)],
            env=client_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=before,
            timeout=60,
        )


def mounts_of(order: LaunchOrder, home: Path, checkout: Path, workdir: Path) -> list[Mount]:
    """What a container sees of the host: its run's folder, runs and data that it reads, this code.

    `ORRERY_DATA_ROOTS` and `ORRERY_CONTAINER_MOUNTS` add folders. Raises ValueError for a path
    that the runtimes' options cannot express.
    """
    mounts = [Mount(home / "runs" / order.run, writable=True), Mount(checkout)]
    mounts += [Mount(home / "runs" / run) for run in order.reads]
    mounts += [Mount(home / name) for name in ("data", "datasets", "models")]
    for variable in ("ORRERY_DATA_ROOTS", "ORRERY_CONTAINER_MOUNTS"):
        mounts += [
            Mount(Path(path))
            for path in os.environ.get(variable, "").split(os.pathsep)
            if path.startswith("/")
        ]
    mounts.append(Mount(workdir, writable=True))
    if order.program is not None:  # its data and large files are links there
        mounts.append(Mount(Path(order.program.folder), writable=True))
    existing = [mount for mount in mounts if mount.path.exists()]
    for mount in existing:
        if re.search(r"[,:\"'\s]", str(mount.path)):
            raise ValueError(
                f"{mount.path} cannot be mounted in a container: its name has a comma, colon, "
                "quote or space."
            )
    return existing


def _docker_gpus(gpus: Sequence[int]) -> list[str]:
    if any(path.exists() for path in _CDI):
        return [f"--device=nvidia.com/gpu={index}" for index in gpus]
    return [f'--gpus="device={",".join(str(index) for index in gpus)}"']  # a field of CSV


def _outermost(mounts: Iterable[Mount]) -> list[Mount]:
    """Without mounts that another one includes with the same or more rights, outer ones first."""
    mounted: list[Mount] = []
    for mount in sorted(set(mounts), key=lambda each: (len(each.path.parts), not each.writable)):
        if not any(
            mount.path.is_relative_to(other.path) and other.writable >= mount.writable
            for other in mounted
        ):
            mounted.append(mount)
    return mounted


def _works(name: str) -> tuple[Runtime, str] | None:
    program = _program(name)
    if program is None:
        return None
    question = ["version", "--format", "{{.Server.Version}}"] if name == "docker" else ["--version"]
    try:
        done: Any = subprocess.run(
            [program, *question],
            env=client_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = done.stdout.strip().rpartition(" ")[2]
    return (Runtime(name, program), version) if done.returncode == 0 and version else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=_SYSTEM_PATH)
