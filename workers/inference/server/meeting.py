"""Where the replicas of one serve run are: every rank tells the others once it listens. And how
they ask each other.

By torch.distributed over gloo, on CPUs and GPUs alike; a group that is made for it is gone
afterwards.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.contracts.specs.api_key_hash import is_hidden
from workers.contracts.wire.exits import UserError
from workers.contracts.wire.serving_reports import KEY_HEADER, serve_key
from workers.inference.env import Surroundings
from workers.inference.server.fleet import Fleet, Replica
from workers.inference.server.relay import Relay

_PATIENCE = timedelta(minutes=60)  # one rank may load much longer than another


def meet(at: tuple[str, int], around: Surroundings, leaders: Any = None) -> list[tuple[str, int]]:
    """Everybody's address by rank, or where several ranks make a replica, that of each one's
    leader, whose group is
    given; blocks until all are there."""
    if leaders is None:
        dist.init_process_group(
            "gloo", timeout=_PATIENCE, rank=around.rank, world_size=around.world_size
        )
    try:
        found: list[tuple[str, int]] = [at] * dist.get_world_size(leaders)
        dist.all_gather_object(found, at, group=leaders)
        return found
    finally:
        if leaders is None:
            dist.destroy_process_group()


def fleet_of(
    addresses: list[tuple[str, int]],
    around: Surroundings,
    *,
    api_key: str | None,
    block_size: int,
    seats: int,
    waiting: int,
) -> Fleet:
    """Of the first rank, which asks the others with the key that it is asked with itself.

    Raises UserError.
    """
    replicas = [
        Replica(rank, None if rank == around.rank else relay_to(address, around, api_key=api_key))
        for rank, address in enumerate(addresses)
    ]
    return Fleet(
        replicas, block_size=block_size, capacity=seats + waiting, slack=max(2, seats // 2)
    )


def relay_to(address: tuple[str, int], around: Surroundings, *, api_key: str | None) -> Relay:
    """To another replica. Raises UserError where nobody could ask it."""
    headers = {} if around.fence is None else {KEY_HEADER: serve_key(around.fence)}
    if not headers and api_key is not None and is_hidden(api_key):
        message = "replicas ask each other with the key, and this one is hidden"
        raise UserError(f"serve.api_key: {message}; give it as it is, or leave it out")
    if api_key is not None and not is_hidden(api_key):
        headers["authorization"] = f"Bearer {api_key}"
    host, port = address
    return Relay(f"http://{_host(host)}:{port}", headers)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
