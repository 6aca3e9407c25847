"""What launcher and torchrun tell a rank of an inference run by its environment.

Read once, typed; loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.contracts.wire.env_numbers import whole


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`address` is where others reach this node; `fence` is None without a control plane."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run: str
    attempt: int | None
    fence: str | None
    address: str
    directory: Path

    @property
    def folder(self) -> Path:
        return self.directory / f"rank-{self.rank}"


def read_surroundings(directory: Path, *, env: Mapping[str, str] = os.environ) -> Surroundings:
    """Raises UserError naming the variable that is not a number."""
    world_size = whole(env, "WORLD_SIZE", 1)
    return Surroundings(
        rank=whole(env, "RANK", 0),
        world_size=world_size,
        local_rank=whole(env, "LOCAL_RANK", 0),
        local_world_size=whole(env, "LOCAL_WORLD_SIZE", world_size),
        run=env.get("ORRERY_RUN", "local"),
        attempt=whole(env, "ORRERY_ATTEMPT", 1) if env.get("ORRERY_ATTEMPT") else None,
        fence=env.get("ORRERY_FENCE") or None,
        address=env.get("ORRERY_ADDRESS") or "127.0.0.1",
        directory=directory,
    )
