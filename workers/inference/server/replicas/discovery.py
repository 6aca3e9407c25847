"""Finds the replicas of a serve run: ranks exchange the addresses that they listen on.

Uses torch.distributed with gloo, on CPUs and GPUs alike; a process group created for it is
destroyed afterwards.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers.contracts.specs.api_key_hash import is_hashed
from workers.contracts.wire.serving_reports import KEY_HEADER, serve_key
from workers.inference.server.replicas.forwarding import Upstream
from workers.inference.server.replicas.router import Replica, ReplicaRouter
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import UserError

_TIMEOUT = timedelta(minutes=60)  # one rank may load much longer than another


def exchange_addresses(
    address: tuple[str, int], environment: Environment, drivers: Any = None
) -> list[tuple[str, int]]:
    """The address of every replica by rank; blocks until all are ready.

    `drivers` is the process group of the replicas' driver ranks, if a replica has several ranks.
    """
    if drivers is None:
        dist.init_process_group(
            "gloo", timeout=_TIMEOUT, rank=environment.rank, world_size=environment.world_size
        )
    try:
        addresses: list[tuple[str, int]] = [address] * dist.get_world_size(drivers)
        dist.all_gather_object(addresses, address, group=drivers)
        return addresses
    finally:
        if drivers is None:
            dist.destroy_process_group()


def create_router(
    addresses: list[tuple[str, int]],
    environment: Environment,
    *,
    api_key: str | None,
    block_size: int,
    max_seqs: int,
    max_waiting: int,
) -> ReplicaRouter:
    """The router of the first rank. Raises UserError."""
    replicas = [
        Replica(
            rank,
            None
            if rank == environment.rank
            else connect_replica(address, environment, api_key=api_key),
        )
        for rank, address in enumerate(addresses)
    ]
    return ReplicaRouter(
        replicas,
        block_size=block_size,
        capacity=max_seqs + max_waiting,
        slack=max(2, max_seqs // 2),
    )


def connect_replica(
    address: tuple[str, int], environment: Environment, *, api_key: str | None
) -> Upstream:
    """A client for another replica. Raises UserError if there is no key that it would accept."""
    headers = {} if environment.fence is None else {KEY_HEADER: serve_key(environment.fence)}
    if not headers and api_key is not None and is_hashed(api_key):
        raise UserError(
            "serve.api_key: replicas call each other with the key, and this one is hashed; give "
            "the plain key, or leave it out"
        )
    if api_key is not None and not is_hashed(api_key):
        headers["authorization"] = f"Bearer {api_key}"
    host, port = address
    host = f"[{host}]" if ":" in host else host
    return Upstream(f"http://{host}:{port}", headers)
