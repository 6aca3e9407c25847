"""Rendezvous of an attempt's torchruns: the first node publishes a free port, the others wait.

The host comes from the signed order, only the port from Redis: a forged message can delay a run but
not redirect it.
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
    """The first node's supervisor published no rendezvous."""


def meet(
    order: LaunchOrder, link: Link, *, keep_waiting: Callable[[], bool], purpose: str = ""
) -> tuple[str, int]:
    """`(host, port)`; each purpose has a port of its own, and a set port is for the ranks only.

    Blocks up to WAIT_S while `keep_waiting()` is true. Raises NoRendezvous, or OSError if no port
    is free.
    """
    if order.nodes == 1:
        return "127.0.0.1", free_port("127.0.0.1")
    host = order.rendezvous.host or link.node.address
    if order.node_rank == 0:
        port = (None if purpose else order.rendezvous.port) or free_port(host)
        wait_for(
            lambda: link.publish_rendezvous(host, port, purpose) or None,
            keep_waiting,
            "Redis is unreachable, so the port cannot be published",
        )
        return host, port
    if order.rendezvous.port is not None and not purpose:
        return host, order.rendezvous.port
    _, port = wait_for(
        lambda: link.rendezvous(purpose),
        keep_waiting,
        f"the first node ({host}) published none within {WAIT_S:.0f} s",
    )
    return host, port


def free_port(host: str) -> int:
    """A free port at this address; torchrun binds it a second later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for(query: Callable[[], T | None], keep_waiting: Callable[[], bool], failure: str) -> T:
    """The first answer of `query` that is not None. Raises NoRendezvous with `failure`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and keep_waiting():
        if (answer := query()) is not None:
            return answer
        time.sleep(0.05)
    raise NoRendezvous(f"No rendezvous: {failure}.")
