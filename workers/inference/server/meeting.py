"""Where the replicas of one serve run are: every rank tells the others once it listens.

By torch.distributed over gloo, on CPUs and GPUs alike; the group is gone afterwards.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from workers.contracts.serving import KEY_HEADER, serve_key
from workers.inference.server.fleet import Fleet, Replica
from workers.inference.server.relay import Relay
from workers.inference.surroundings import Surroundings

_PATIENCE = timedelta(minutes=60)  # one rank may load much longer than another


def meet(at: tuple[str, int]) -> list[tuple[str, int]]:
    """Everybody's address by rank; blocks until all are there."""
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        found: list[tuple[str, int]] = [at] * dist.get_world_size()
        dist.all_gather_object(found, at)
        return found
    finally:
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
    """Of the first rank, which asks the others with the key that it is asked with itself."""
    headers = {} if around.fence is None else {KEY_HEADER: serve_key(around.fence)}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    replicas = [
        Replica(rank, None if rank == around.rank else Relay(f"http://{_host(host)}:{port}", headers))
        for rank, (host, port) in enumerate(addresses)
    ]
    return Fleet(replicas, block_size=block_size, capacity=seats + waiting, slack=max(2, seats // 2))


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
