"""As which user of the broker this node connects: its own, or the one in the given URL.

Its own user is limited to the node's keys; the control plane creates it. Does not join.
"""

from __future__ import annotations

import logging
import time
from typing import Final, Literal

import redis

from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)
# a restarted broker has the user again when the scheduler has noticed
PATIENCE_S: Final = 30.0
User = Literal["own", "shared"]


class NoLogin(RuntimeError):
    """The broker accepts neither the node's user nor another that may work."""


def choose(
    redis_url: str, *, node: str, secret: bytes, before: User | None, patience_s: float = PATIENCE_S
) -> tuple[str, User]:
    """`(URL, user)`; `before` is the user of the node's last start or, after a join, its answer.

    The own user wherever the broker has it; a node that had one waits for it. While the broker
    does not answer, the user stays as it was. Raises NoLogin.
    """
    name = broker_access.node_user(node)
    own = broker_access.url_as(redis_url, name, broker_access.node_password(secret))
    deadline = time.monotonic() + patience_s
    while (accepted := _accepts(own)) is False and before == "own":
        if time.monotonic() >= deadline:
            log.warning("The broker refuses the user %s of this node", name)
            break
        time.sleep(0.5)
    if accepted or (accepted is None and before == "own"):
        return own, "own"
    if broker_access.user_of(redis_url) == broker_access.JOIN_USER:
        if accepted is None:
            return own, "own"
        raise NoLogin(
            f"The broker has no user {name}, and {broker_access.JOIN_USER} of --redis may only "
            "join. Is the scheduler running, and is the node still in the fleet? Join it again "
            "with a new token, or give a URL with shared credentials."
        )
    return redis_url, "shared"


def _accepts(url: str) -> bool | None:
    """Whether the broker accepts the URL's user; None if it does not answer."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=5, socket_connect_timeout=5, retry=None, **tls_options(url)
        ) as client:
            client.ping()
    except (redis.AuthenticationError, redis.ResponseError):
        return False
    except (redis.RedisError, OSError):
        return None
    return True
