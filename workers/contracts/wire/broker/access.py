"""Users of the broker: one per node, limited to the node's keys, and one for joining.

Both sides derive a node's password from its secret, so it is never sent. Does not depend on Redis;
`orchestrator.fleet.broker_users` creates the users.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

JOIN_USER: Final = "orrery-join"
NODE_USERS: Final = "orrery-node-"  # followed by the node's name
FIELD_USER: Final = "redis_user"  # of a join reply: the node's user, if the broker has one


def node_user(node: str) -> str:
    """The node's user at the broker."""
    return f"{NODE_USERS}{node}"


def node_password(secret: bytes) -> str:
    """The password of the node with this secret."""
    return hmac.new(secret, b"redis password", hashlib.sha256).hexdigest()


def url_as(url: str, user: str, password: str) -> str:
    """The Redis URL with another user and password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return urlunsplit(parts._replace(netloc=f"{login}@{host}"))


def is_node_user(url: str) -> bool:
    """Whether the URL has the user of one node, which may only write to that node's keys."""
    return user_of(url).startswith(NODE_USERS)


def user_of(url: str) -> str:
    """The user that a Redis URL names; empty for the default user."""
    return urlsplit(url).username or ""
