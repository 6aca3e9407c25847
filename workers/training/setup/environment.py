"""What the surroundings tell a rank: torchrun's variables and Orrery's own. Read once, typed.

Does not import torch: a wrong world size must be told before anything heavy is loaded.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.wire.env_numbers import whole
from workers.contracts.wire.exits import UserError


@dataclass(frozen=True, slots=True)
class Environment:
    """`checkpoints` is shared by all attempts of a run; `resume` is one checkpoint's folder, or
    None for the newest.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run: str
    attempt: int | None
    directory: Path
    checkpoints: Path
    resume: Path | None
    timeout_s: float
    scratch: Path
    node: str

    @property
    def leads_node(self) -> bool:
        return self.local_rank == 0

    @property
    def spans_nodes(self) -> bool:
        return self.local_world_size < self.world_size

    @property
    def rank_directory(self) -> Path:
        return self.directory / f"rank-{self.rank}"

    @property
    def cache(self) -> Path:
        """For what later attempts need not do again: the run's folder where attempts lie below it,
        else this one's.
        """
        run = self.checkpoints.parent
        return (
            run if self.directory.absolute().is_relative_to(run.absolute()) else self.directory
        ) / "cache"


def read_environment(
    directory: Path, *, resume: Path | None = None, env: Mapping[str, str] = os.environ
) -> Environment:
    """`ORRERY_RUN` (default local), `ORRERY_ATTEMPT` (default: one more than the directory holds),
    `ORRERY_CHECKPOINTS`
    (default DIR/checkpoints), `ORRERY_RESUME`, `ORRERY_PG_TIMEOUT_S` (default 600),
    `ORRERY_SCRATCH`
    (default DIR/scratch: where states that are offloaded to disk go), `ORRERY_NODE` (default: the
    machine's name), and
    torchrun's variables.

    Raises UserError naming the variable that is not a number.
    """
    world_size = whole(env, "WORLD_SIZE", 1)
    told = env.get("ORRERY_RESUME")
    return Environment(
        rank=whole(env, "RANK", 0),
        world_size=world_size,
        local_rank=whole(env, "LOCAL_RANK", 0),
        local_world_size=whole(env, "LOCAL_WORLD_SIZE", world_size),
        run=env.get("ORRERY_RUN", "local"),
        attempt=whole(env, "ORRERY_ATTEMPT", 1) if "ORRERY_ATTEMPT" in env else None,
        directory=directory,
        checkpoints=Path(env.get("ORRERY_CHECKPOINTS") or directory / "checkpoints"),
        resume=resume or (Path(told) if told else None),
        timeout_s=float(whole(env, "ORRERY_PG_TIMEOUT_S", 600)),
        scratch=Path(env.get("ORRERY_SCRATCH") or directory / "scratch"),
        node=env.get("ORRERY_NODE") or platform.node(),
    )


def check_world(plan: ParallelPlan, environment: Environment) -> None:
    """Raises UserError where the plan and torchrun disagree on the number of processes."""
    if plan.world_size == environment.world_size:
        return
    plan_says = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} = {plan.world_size}"
    started = f"{environment.world_size} process" + ("es" if environment.world_size > 1 else "")
    raise UserError(
        f"plan: {plan_says} devices, but {started} started (WORLD_SIZE); "
        f"try torchrun --nproc-per-node {plan.world_size}, or dp {environment.world_size}"
    )
