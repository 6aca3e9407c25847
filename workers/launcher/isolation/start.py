"""How torchrun of an attempt starts on this node: under which user, limits and container image.

Looks at files of this node, and unpacks a script's program. Starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command
from workers.launcher.isolation import containers, wrap
from workers.launcher.isolation.acting import before_program
from workers.launcher.isolation.limits import Limits, in_scope
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.programs.environment import (
    MissingLock,
    PreparedEnvironment,
    environment_of,
    plan_environment,
)
from workers.launcher.programs.unpack import unpack_program
from workers.launcher.rundir import RunDir, open_to_append

LIMITS_VARIABLE: Final = "ORRERY_NODE_LIMITS"  # set by the agent: systemd, or empty


class NotSupported(RuntimeError):
    """This node cannot start the attempt as its spec asks; the message says what is missing."""


@dataclass(frozen=True)
class Start:
    """`stdin`: what the program reads there; `group`: it has a control group of its own."""

    arguments: list[str]
    env: dict[str, str]
    folder: Path
    stdin: bytes | None = None
    group: bool = False


def unpack(order: LaunchOrder, run_dir: RunDir) -> None:
    """Unpack a script's program into the run directory. Raises NotSupported if damaged, OSError."""
    try:
        unpack_program(order, run_dir)
    except ValueError as error:
        raise NotSupported(f"The program of this run cannot be used: {error}.") from None


def check(order: LaunchOrder, run_dir: RunDir) -> None:
    """Whether this node can start the attempt. Raises Unlaunchable or NotSupported."""
    image = containers.image_of(order)
    command.program(order, run_dir, python=sys.executable if image is None else containers.PYTHON)
    runtime = containers.chosen()
    if image is not None and runtime is None:
        raise NotSupported(
            f"This node has neither Docker nor Apptainer, so image {image} cannot run there."
        )
    in_docker = image is not None and runtime is not None and runtime.name == "docker"
    limits = Limits.of(order.spec.get("resources") or {})
    if limits and not in_docker and os.environ.get(LIMITS_VARIABLE) != "systemd":
        raise NotSupported(
            "This node cannot limit memory, CPU time or processes of a run (resources.memory_gb, "
            "cpus, processes): systemd does not run there, or the agent may not start scopes."
        )
    if image is not None and image.endswith(".sif"):
        file = command.node_home(run_dir, order) / image
        if in_docker:
            raise NotSupported(f"This node has Docker but not Apptainer, which {image} needs.")
        if not file.is_file():
            raise command.Unlaunchable(
                f"resources.image: there is no file {file} on this node; create it there."
            )


def prepare(
    order: LaunchOrder,
    run_dir: RunDir,
    user: RunUser | None,
    *,
    host: str,
    port: int,
    address: str,
    local_address: str,
    secrets: Mapping[str, str],
) -> Start:
    """The command of torchrun with its environment, after `check`. Raises Unlaunchable."""
    image = containers.image_of(order)
    python = sys.executable if image is None else containers.PYTHON
    _, folder = command.program(order, run_dir, python=python)
    environment = _environment(order, run_dir, user, folder)
    arguments = command.torchrun(
        order,
        run_dir,
        host=host,
        port=port,
        local_address=local_address,
        python=python if environment is None else environment.python,
    )
    if environment is not None:
        arguments = environment.wrapped(arguments)
    base = os.environ if image is None else containers.inherited(os.environ)
    env = command.environment(
        order, run_dir, host=host, address=address, secrets=secrets, base=base
    )
    if user is not None:
        env |= wrap.user_environment(command.node_home(run_dir, order), user)
    limits = Limits.of(order.spec.get("resources") or {})
    start = Start(arguments, env, folder)
    if image is not None:
        start = _in_container(start, order, run_dir, user, image, limits)
        if start.group:
            return start
    elif user is not None or limits:
        words = containers.entered(arguments, sys.executable)
        mask = 0o027 if user is not None else 0o022
        start = Start(
            words if user is None else wrap.as_user(words, user),
            containers.client_environment(os.environ),
            folder,
            containers.start_input(env, umask=mask),
        )
    if not limits:
        return start
    scoped = in_scope(start.arguments, limits, name=containers.container_name(order))
    return Start(scoped, start.env, start.folder, start.stdin, group=True)


def spawn(prepared: Start, run_dir: RunDir, user: RunUser | None) -> subprocess.Popen[bytes]:
    """Start torchrun in its own session; its output goes to `torchrun.log`. Raises OSError."""
    with open_to_append(run_dir.path / "torchrun.log") as log:
        torchrun = subprocess.Popen(
            prepared.arguments,
            cwd=prepared.folder,
            env=prepared.env,
            stdin=subprocess.DEVNULL if prepared.stdin is None else subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(before_program, user),
        )
    if prepared.stdin is not None and torchrun.stdin is not None:
        # a container's client reads it when it has fetched the image
        arguments = (torchrun.stdin, prepared.stdin)
        threading.Thread(target=_write, args=arguments, name="input", daemon=True).start()
    return torchrun


def _write(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError), pipe:
        pipe.write(data)


def _environment(
    order: LaunchOrder, run_dir: RunDir, user: RunUser | None, folder: Path
) -> PreparedEnvironment | None:
    """The packages of a script that brings its own. Raises Unlaunchable."""
    wanted = environment_of(order)
    if wanted is None or containers.image_of(order) is not None:
        return None
    home = command.node_home(run_dir, order)
    try:
        return plan_environment(wanted, run_dir, work_folder=folder, home=home, user=user)
    except MissingLock as error:
        raise command.Unlaunchable(f"script.environment.lock: {error}.") from None


def _in_container(
    start: Start,
    order: LaunchOrder,
    run_dir: RunDir,
    user: RunUser | None,
    image: str,
    limits: Limits,
) -> Start:
    runtime = containers.chosen()
    assert runtime is not None  # `check`
    home = command.node_home(run_dir, order)
    try:
        mounts = containers.mounts_of(order, home, command.ROOT, start.folder)
    except ValueError as error:
        raise command.Unlaunchable(str(error)) from None
    if user is not None:
        mounts.append(containers.Mount(home / "users" / str(user.uid), writable=True))
    gpus = order.local_devices if order.device_kind == "gpu" else []
    stdin = containers.start_input
    mask = 0o027 if user is not None else 0o022
    client = containers.client_environment(os.environ)
    if runtime.name == "docker":
        arguments = containers.docker(
            runtime,
            start.arguments,
            image=image,
            name=containers.container_name(order),
            user=user,
            mounts=mounts,
            workdir=start.folder,
            gpus=gpus,
            limits=limits,
        )
        env = start.env
        if gpus:  # the container has only these, numbered from 0
            env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus))))}
        return Start(arguments, client, home, stdin(env, umask=mask), group=True)
    source = str(home / image) if image.endswith(".sif") else image
    arguments = containers.apptainer(
        runtime, start.arguments, image=source, mounts=mounts, workdir=start.folder, gpus=gpus
    )
    if user is not None:  # its cache is in the user's home
        arguments = wrap.as_user(arguments, user)
        client |= wrap.user_environment(home, user)
    return Start(arguments, client, home, stdin(start.env, umask=mask))
