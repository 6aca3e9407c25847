"""Where an attempt's torchruns meet: the first node's supervisor finds a free port and says so, the
others wait for it.

The host comes from the signed order alone; from Redis only a port, so a forged word can delay a
run, not redirect it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.shipping.redis_link import Link

T = TypeVar("T")
WAIT_S = 120.0


class NoRendezvous(OSError):
    """The first node's supervisor did not say where to meet."""


def meet(order: LaunchOrder, link: Link, *, keep_on: Callable[[], bool]) -> tuple[str, int]:
    """`(host, port)`.

    Blocks up to WAIT_S while `keep_on()` is true. Raises NoRendezvous, OSError for no free port.
    """
    if order.nodes == 1:
        return "127.0.0.1", free_port("127.0.0.1")
    host = order.rendezvous.host or link.node.address
    if order.node_rank == 0:
        port = order.rendezvous.port or free_port(host)
        wait_for(
            lambda: link.publish_rendezvous(host, port) or None,
            keep_on,
            "Redis is away, so the other nodes cannot be told",
        )
        return host, port
    if order.rendezvous.port is not None:
        return host, order.rendezvous.port
    _, port = wait_for(
        link.rendezvous,
        keep_on,
        f"the first node ({host}) named no rendezvous within {WAIT_S:.0f} s",
    )
    return host, port


def free_port(host: str) -> int:
    """A port nobody listens on at this address.

    It is free again at once: torchrun binds it a second later.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for(ask: Callable[[], T | None], keep_on: Callable[[], bool], otherwise: str) -> T:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and keep_on():
        if (answer := ask()) is not None:
            return answer
        time.sleep(0.05)
    raise NoRendezvous(f"No rendezvous: {otherwise}.")
