"""torchrun's command line and environment of a launch order, by kind of program.

Pure except for checks whether a script exists. Starts nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import workers
from workers.contracts.catalog.secret_names import is_secret_name
from workers.contracts.specs.inference_support import INFERENCE_KINDS, placement_of
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.programs import unpack
from workers.launcher.rundir import RunDir

ROOT = Path(workers.__file__).resolve().parent.parent
RANK_WRAPPER = Path(__file__).resolve().parent / "rank_wrapper.py"
OWN_PROGRAMS = {
    "train": "workers.training.main",
    "benchmark": "workers.training.benchmark.main",
    "produce": "workers.posttraining.produce.main",
    **dict.fromkeys(("generate", "serve", "evaluate"), "workers.inference.main"),
}
# programs of training objectives that also generate
OBJECTIVE_PROGRAMS = {
    "grpo": "workers.posttraining.reinforcement.main",
    "ppo": "workers.posttraining.reinforcement.main",
}
# measures the plans of an order that lists some
TRIALS_PROGRAM = "workers.training.trials.main"
# `-m torch.distributed.run` without garbage collection while it loads torch, whose 500,000 objects
# stay: 1.5 instead of 2.3 CPU seconds
TORCHRUN = (
    "import gc, sys; gc.disable(); from torch.distributed.run import main; "
    "gc.freeze(); gc.enable(); sys.exit(main())"
)
LOOPBACK = ("127.", "localhost", "::1")


class Unlaunchable(ValueError):
    """The run cannot be started on any node: a user error; the message says why."""


def node_home(run_dir: RunDir, order: LaunchOrder) -> Path:
    """The node's home, the base of the order's relative paths."""
    return run_dir.path.parents[len(Path(order.run_dir).parts) - 1]


def program(
    order: LaunchOrder, run_dir: RunDir, *, python: str = sys.executable
) -> tuple[list[str], Path]:
    """The command of one rank and the folder it starts in. Raises Unlaunchable.

    `python` is this node's or, in a container image, the image's; the files of an image are only
    known there.
    """
    if order.kind in OWN_PROGRAMS:
        objective = str((order.spec.get("train") or {}).get("objective"))
        module = OBJECTIVE_PROGRAMS.get(objective, OWN_PROGRAMS[order.kind])
        if order.trials is not None:
            module = TRIALS_PROGRAM
        return [
            python,
            "-u",
            "-m",
            module,
            "--spec",
            str(run_dir.spec),
            "--dir",
            str(run_dir.path),
        ], run_dir.path
    if order.kind == "script":
        return _script(order, run_dir, python)
    raise Unlaunchable(
        f"This node cannot start runs of kind {order.kind}; it starts {', '.join(OWN_PROGRAMS)} "
        "and script."
    )


def _script(order: LaunchOrder, run_dir: RunDir, python: str) -> tuple[list[str], Path]:
    in_image = bool((order.spec.get("resources") or {}).get("image"))
    body = order.spec.get("script") or {}
    command = [str(part) for part in body.get("command") or []]
    if not command:
        raise Unlaunchable(
            'script.command is empty; give a program, as ["train.py", "--lr", "0.1"].'
        )
    command = unpack.command_of(order, run_dir, command)
    folder = unpack.work_folder(order, run_dir) or (
        node_home(run_dir, order) / body["workdir"] if body.get("workdir") else run_dir.path
    )
    if not folder.is_dir() and not in_image:
        raise Unlaunchable(
            f"script.workdir {folder} is not a folder on this node; create it there, or give "
            "another."
        )
    first = command[0]
    if first == "--no-python":
        return command[1:], folder
    if first == "-m":
        return [python, "-u", *command], folder
    if first.endswith(".py"):
        if not (folder / first).is_file() and not in_image:
            raise Unlaunchable(
                f"script.command: there is no file {folder / first} on this node; check the path "
                "and workdir."
            )
        return [python, "-u", *command], folder
    if in_image or body.get("environment"):  # programs of the image, or of packages to install
        return command, folder
    if shutil.which(first, path=os.environ.get("PATH")) is None and not (folder / first).is_file():
        raise Unlaunchable(
            f"script.command: {first} is neither a program on this node's PATH nor a file in "
            f"{folder}."
        )
    return command, folder


def _runs_own_module(order: LaunchOrder) -> bool:
    """Whether a script is one of Orrery's programs, such as `-m workers.….main`."""
    command = [str(part) for part in (order.spec.get("script") or {}).get("command") or []]
    return (
        order.kind == "script"
        and command[:1] == ["-m"]
        and command[1:2] != []
        and (command[1].startswith("workers."))
    )


def torchrun(
    order: LaunchOrder,
    run_dir: RunDir,
    *,
    host: str,
    port: int,
    local_address: str,
    python: str = sys.executable,
) -> list[str]:
    """`torch.distributed.run` with a static rendezvous; each rank runs under `rank_wrapper.py`."""
    ranks, _ = program(order, run_dir, python=python)
    return [
        python,
        "-c",
        TORCHRUN,
        "--nnodes",
        str(order.nodes),
        "--node-rank",
        str(order.node_rank),
        "--nproc-per-node",
        str(order.local_ranks),
        "--rdzv-backend",
        "static",
        "--master-addr",
        host,
        "--master-port",
        str(port),
        "--local-addr",
        local_address,
        "--max-restarts",
        "0",
        "--monitor-interval",
        "0.1",
        "--no-python",
        python,
        "-S",
        "-E",
        str(RANK_WRAPPER),
        str(run_dir.path),
        "--",
        *ranks,
    ]


def checkpoints(order: LaunchOrder, run_dir: RunDir) -> Path:
    """The checkpoint folder: shared by a run's attempts, except on nodes without a shared
    directory,
    where each holds a part of a checkpoint.
    """
    if order.nodes > 1 and order.shared_dir is None:
        return run_dir.path / "checkpoints"
    return node_home(run_dir, order) / (order.shared_dir or f"runs/{order.run}") / "checkpoints"


def environment(
    order: LaunchOrder,
    run_dir: RunDir,
    *,
    host: str,
    address: str = "127.0.0.1",
    secrets: Mapping[str, str] | None = None,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Environment of torchrun and all ranks.

    The order overrides defaults but not Orrery's own variables. `host` is the rendezvous,
    `address` is where other nodes reach this one, `secrets` the decrypted variables.
    """
    home = node_home(run_dir, order)
    script = (order.spec.get("script") or {}).get("env") or {}
    requested = {**order.env, **script, **(secrets or {})}
    gpu = order.device_kind == "gpu"
    defaults = {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not gpu:
        # a slot is a core; a pool per core and rank slows every rank
        defaults["OMP_NUM_THREADS"] = "1"
    if host.startswith(LOOPBACK):
        defaults["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    # the recorder's folder lets a script `import orrery_recorder`
    own = order.kind in OWN_PROGRAMS or _runs_own_module(order)
    path = [str(ROOT)] if own else [str(ROOT / "workers" / "recorder")]
    path += [part for part in (requested.get("PYTHONPATH", base.get("PYTHONPATH", "")),) if part]
    inherited = {name: value for name, value in base.items() if may_inherit(name)}
    variables = {
        **inherited,
        **defaults,
        **requested,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in order.local_devices)
        if gpu
        else "",
        "ORRERY_HOME": str(home),
        "ORRERY_RUN": order.run,
        "ORRERY_ATTEMPT": str(order.attempt),
        "ORRERY_FENCE": order.fence,
        "ORRERY_NODE": base.get("ORRERY_NODE", ""),
        "ORRERY_ADDRESS": address,
        "ORRERY_RUN_DIR": str(run_dir.path),
        "ORRERY_CHECKPOINTS": str(checkpoints(order, run_dir)),
        # the supervisor identifies the hanging rank, so it must report before a collective times
        # out
        "ORRERY_PG_TIMEOUT_S": inherited.get("ORRERY_PG_TIMEOUT_S", str(round(order.hang_s) + 60)),
    }
    if not gpu and order.device_memory_bytes is not None:
        variables["ORRERY_SLOT_BYTES"] = str(order.device_memory_bytes)
    if order.program is not None and order.program.commit:
        variables["ORRERY_COMMIT"] = order.program.commit
    if order.resume_from is not None:
        variables["ORRERY_RESUME"] = str(home / order.resume_from.path)
    return variables


def pipeline_stage(order: LaunchOrder, rank: int) -> int:
    """The pipeline stage of a rank; in training, stages are the outermost axis of the mesh."""
    if order.kind in INFERENCE_KINDS:
        return placement_of(ParallelPlan.from_dict(order.plan or {}), rank).stage
    stages = (order.plan or {}).get("pp") or 1
    return rank * int(stages) // order.world_size


def may_inherit(name: str) -> bool:
    """Whether a program may see this variable: not the node's own settings or secrets."""
    if name in ("ORRERY_PG_TIMEOUT_S", "ORRERY_SCRATCH"):
        return True
    if is_secret_name(name):
        return name in os.environ.get("ORRERY_RUN_ENV", "").replace(",", " ").split()
    return not name.startswith(("ORRERY_", "TORCHELASTIC_")) and name not in (
        "REDIS_URL",
        "DATABASE_URL",
    )
