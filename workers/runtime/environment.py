"""Environment of a rank: torchrun's variables and Orrery's own, read once and typed.

Does not import torch, so a wrong world size is reported before anything heavy loads.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.contracts.specs.plan import ParallelPlan
from workers.runtime.exit_codes import UserError


@dataclass(frozen=True, slots=True)
class Environment:
    """What a rank reads from its environment.

    `fence` is None without a control plane; other nodes reach this one at `address`.
    All attempts of a run share `checkpoints`; `resume` is one checkpoint's folder, or None for
    the newest. States offloaded to disk go to `scratch`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run: str
    attempt: int | None
    fence: str | None
    address: str
    node: str
    directory: Path
    checkpoints: Path
    resume: Path | None
    scratch: Path
    timeout_s: float

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    @property
    def spans_nodes(self) -> bool:
        """Whether the ranks run on more than one node."""
        return self.local_world_size < self.world_size

    @property
    def rank_directory(self) -> Path:
        """This rank's folder in the run directory."""
        return self.directory / f"rank-{self.rank}"

    @property
    def cache(self) -> Path:
        """Folder for results that later attempts reuse: in the run's folder if this attempt's
        directory lies below it, else in this directory.
        """
        run = self.checkpoints.parent
        shared = self.directory.absolute().is_relative_to(run.absolute())
        return (run if shared else self.directory) / "cache"


def read_environment(
    directory: Path, *, resume: Path | None = None, env: Mapping[str, str] = os.environ
) -> Environment:
    """Read torchrun's variables and Orrery's.

    `ORRERY_RUN` (default local), `ORRERY_ATTEMPT` (default: the last one in the directory + 1),
    `ORRERY_FENCE`, `ORRERY_ADDRESS` (default 127.0.0.1), `ORRERY_NODE` (default: the host name),
    `ORRERY_CHECKPOINTS` (default DIR/checkpoints), `ORRERY_RESUME`,
    `ORRERY_SCRATCH` (default DIR/scratch), `ORRERY_PG_TIMEOUT_S` (default 600).
    Raises UserError naming the variable that is not a number.
    """
    world_size = _integer(env, "WORLD_SIZE", 1)
    resume_folder = env.get("ORRERY_RESUME")
    return Environment(
        rank=_integer(env, "RANK", 0),
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK", 0),
        local_world_size=_integer(env, "LOCAL_WORLD_SIZE", world_size),
        run=env.get("ORRERY_RUN", "local"),
        attempt=_integer(env, "ORRERY_ATTEMPT", 1) if env.get("ORRERY_ATTEMPT") else None,
        fence=env.get("ORRERY_FENCE") or None,
        address=env.get("ORRERY_ADDRESS") or "127.0.0.1",
        node=env.get("ORRERY_NODE") or platform.node(),
        directory=directory,
        checkpoints=Path(env.get("ORRERY_CHECKPOINTS") or directory / "checkpoints"),
        resume=resume or (Path(resume_folder) if resume_folder else None),
        scratch=Path(env.get("ORRERY_SCRATCH") or directory / "scratch"),
        timeout_s=float(_integer(env, "ORRERY_PG_TIMEOUT_S", 600)),
    )


def check_world(plan: ParallelPlan, environment: Environment, *, more: int = 0) -> None:
    """Raises UserError if plan, with `more` ranks, and torchrun disagree on the number of
    processes.
    """
    size = plan.world_size + more
    if size == environment.world_size:
        return
    degrees = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp}"
    degrees += f" and {more} for rollouts = {size}" if more else f" = {size}"
    started = f"{environment.world_size} process" + ("es" if environment.world_size > 1 else "")
    raise UserError(
        f"plan: {degrees} devices, but {started} started (WORLD_SIZE). "
        f"Use torchrun --nproc-per-node {size}, or dp {max(1, environment.world_size - more)}."
    )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise UserError(
            f"{name}={env[name]!r} is not a whole number. Use {name}={default}."
        ) from None
