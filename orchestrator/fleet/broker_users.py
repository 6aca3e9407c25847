"""Users of the broker: one per node, limited to the node's own keys, and one for joining.

Redis and Valkey from version 7.0 on support the rules (key permissions and selectors). They do not
store users in the append-only file, so the scheduler creates them again after each start of the
broker. Where the broker refuses, nodes share the credentials that they were given.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import redis
from django.conf import settings

from orchestrator.common.redis import client, quick_client
from orchestrator.fleet import selectors
from orchestrator.fleet.cluster_engines import members
from workers.contracts.wire import liveness, names
from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)

# without keys: connections, and transactions
_CONNECT = ("+ping", "+select", "+client|setname")
_CONNECT_SINCE_7_2 = ("+client|setinfo",)
_TRANSACT = ("+multi", "+exec", "+discard", "+watch", "+unwatch")


def node_rules(node: str) -> list[str]:
    """What the node's agent and supervisors may do, as words of ACL SETUSER.

    Each selector has the commands for its keys only, so a node cannot store another type of value
    where the control plane reads. Names of nodes have no character that patterns use.
    """

    def own(name: str) -> str:
        return names.node_key(node, name)

    return [
        *_CONNECT,
        *_TRANSACT,
        f"(~{names.node_queue(node)} +brpop +rpop +lpush +rpush +llen +exists)",
        f"(~{own(names.UNACKED)} +watch +hget +hset +hdel)",
        f"(~{own(names.UNACKED_INDEX)} +zadd +zrem +zrange +zrevrangebyscore)",
        f"(%W~{liveness.heartbeat_key(node)} +xadd)",
        f"(%W~{liveness.leases_key(node)} +hset +hdel)",
        f"(~{own('rdzv:*')} +get +set)",
        f"(%R~{own(names.ENGINE_ORDER)} %R~{own(names.ENGINE_REQUEST)} +get)",
        f"(~{own(names.ENGINE_CLAIM)} +get +set)",
        # of the first nodes of attempts, and of those of release 0.1
        f"(%R~{names.node_key('*', 'rdzv:*')} ~orrery:rdzv:* +get)",
        "(%W~orrery:rdzv:* +set)",
        f"(%R~{names.CONTROL} +get)",
        f"(%R~{liveness.REVOKED} +hexists)",
        f"(%R~{names.acked_key('*')} +hgetall)",
        f"(%W~{names.reports_stream(node)} %W~{names.telemetry_stream(node)} +xadd)",
    ]


def join_rules() -> list[str]:
    """What a machine that has not joined yet may do: send a request and read the reply to it."""
    return [
        *_CONNECT,
        f"(%R~{names.CONTROL} +get)",
        f"(%W~{names.JOINS} +xadd)",
        f"(~{names.join_reply_key('*')} +blpop)",
    ]


def limited_join_url() -> str | None:
    """The URL with the user for joining, which is created if the broker lacks it.

    None without users: they are turned off, or the broker refuses them.
    """
    if not settings.ENV.redis_acl:
        return None
    passwords = _join_passwords()
    url = broker_access.url_as(settings.REDIS_URL, broker_access.JOIN_USER, passwords[0])
    if _refuses(url) and not _apply({broker_access.JOIN_USER: [*_words(passwords), *join_rules()]}):
        return None
    return url


def join_url() -> str:
    """The URL with which a machine joins: REDIS_URL itself without users."""
    return limited_join_url() or str(settings.REDIS_URL)


def apply_all() -> bool:
    """Create or correct the users of all nodes and for joining, delete those of removed nodes.

    False if users are turned off, which deletes them, or if the broker does not support or allow
    it, or is not reachable.
    """
    if not settings.ENV.redis_acl:
        _delete_all()
        return False
    known = {
        broker_access.node_user(sender.name): _node_words(sender.name, sender.secret)
        for sender in selectors.senders(selectors.node_names())
    }
    known |= {
        broker_access.node_user(name): _node_words(name, secret)
        for name, secret in members.member_secrets()
    }
    known[broker_access.JOIN_USER] = [*_words(_join_passwords()), *join_rules()]
    return _apply(known, delete_others=True)


def apply_node(name: str) -> bool:
    """Create or replace the node's user; connections under an earlier secret are closed."""
    if not settings.ENV.redis_acl:
        return False
    senders = selectors.senders([name])
    if not senders:
        return False
    user = broker_access.node_user(name)
    return _apply({user: _node_words(name, senders[0].secret)}, close=user)


def apply_members(names_: Sequence[str]) -> bool:
    """Create the users of supervisors in a job of an engine; False where the broker has none."""
    if not settings.ENV.redis_acl:
        return False
    known = members.member_secrets(names_)
    return _apply({broker_access.node_user(name): _node_words(name, key) for name, key in known})


def remove_node(name: str) -> None:
    """Delete a removed node's user, which closes its connections, and its keys. Never raises."""
    keys = [names.node_queue(name), liveness.heartbeat_key(name), liveness.leases_key(name)]
    parts = (names.UNACKED, names.UNACKED_INDEX, names.ENGINE_ORDER, names.ENGINE_REQUEST)
    keys += [names.node_key(name, part) for part in (*parts, names.ENGINE_CLAIM)]
    keys += [names.reports_stream(name), names.telemetry_stream(name)]
    try:
        with quick_client().pipeline(transaction=False) as pipe:
            if settings.ENV.redis_acl:
                pipe.acl_deluser(broker_access.node_user(name))
            pipe.delete(*keys)
            pipe.execute(raise_on_error=False)
    except (redis.RedisError, OSError) as error:
        log.warning("The broker's user of %s is deleted later: %s", name, error)


def close_node(name: str, *, patience_s: float) -> int:
    """End the node's access, and wait until its messages are read; how many are not. Never raises.

    A node with shared credentials can still write.
    """
    streams = (names.reports_stream(name), names.telemetry_stream(name))
    deadline = time.monotonic() + patience_s
    try:
        server = quick_client()
        if settings.ENV.redis_acl:
            with contextlib.suppress(redis.ResponseError):  # a broker without users
                server.acl_deluser(broker_access.node_user(name))
        while (unread := sum(int(server.xlen(stream)) for stream in streams)) > 0:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return unread
    except (redis.RedisError, OSError) as error:
        log.warning("Whether all messages of %s are read is unknown: %s", name, error)
        return 0


def delete_unknown(nodes: Collection[str]) -> None:
    """Delete keys of nodes that are not in the fleet any more. Raises errors of Redis."""
    server, known = client(), set(nodes)
    keys = [_key_and_node(key) for key in server.scan_iter(names.node_key("*", "*"), count=1000)]
    gone = [(key, node) for key, node in keys if node not in known]
    known.update(selectors.node_names() if gone else ())  # others may have joined meanwhile
    if old := [key for key, node in gone if node not in known]:
        server.delete(*old)


def _key_and_node(key: bytes) -> tuple[bytes, str]:
    return key, key.decode("utf-8", "replace").split(":")[2]


def broker_start() -> str | None:
    """Identifies the broker's process, so that its restart is noticed; None without answer."""
    try:
        return str(quick_client().info("server").get("run_id", ""))
    except (redis.RedisError, OSError):
        return None


def _refuses(url: str) -> bool:
    """Whether the broker answers, and does not accept the URL's user."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=2, socket_connect_timeout=2, retry=None, **tls_options(url)
        ) as connection:
            connection.ping()
    except (redis.AuthenticationError, redis.ResponseError):
        return True
    except (redis.RedisError, OSError):
        return False
    return False


def _apply(
    users: Mapping[str, Sequence[str]], *, delete_others: bool = False, close: str | None = None
) -> bool:
    try:
        info: Any = client().info("server")
        newer = tuple(map(int, info["redis_version"].split(".")[:2])) >= (7, 2)
        with client().pipeline(transaction=False) as pipe:
            for user, words in users.items():
                more = _CONNECT_SINCE_7_2 if newer else ()
                # redis-py's own method adds passwords and keys one by one
                pipe.execute_command("ACL", "SETUSER", user, *words, *more)  # type: ignore[no-untyped-call]
            pipe.execute()
            if delete_others and (others := sorted(_ours(client()) - set(users))):
                pipe.acl_deluser(*others)
            if close is not None:
                pipe.client_kill_filter(user=close)
            pipe.execute()
    except redis.ResponseError as error:
        log.warning(
            "The broker has no users for nodes, which share the credentials of their REDIS_URL: %s "
            "(Redis or Valkey 7.0 or later, and the right to ACL SETUSER, are needed; "
            "ORRERY_REDIS_ACL=0 turns this off)",
            error,
        )
        return False
    except (redis.RedisError, OSError) as error:
        log.warning("The broker's users of nodes are checked later: %s", error)
        return False
    return True


def _delete_all() -> None:
    """Delete the nodes' users, as far as the broker has any and allows it."""
    try:
        if users := _ours(client()):
            client().acl_deluser(*sorted(users))
            log.info("Deleted %d users of nodes at the broker (ORRERY_REDIS_ACL=0)", len(users))
    except (redis.RedisError, OSError) as error:
        log.debug("Users of nodes were not deleted: %s", error)


def _ours(server: redis.Redis) -> set[str]:
    answer: Any = server.acl_users()
    users = {name.decode() if isinstance(name, bytes) else str(name) for name in answer}
    return {name for name in users if name.startswith(broker_access.NODE_USERS)}


def _node_words(name: str, secret: bytes) -> list[str]:
    return [*_words([broker_access.node_password(secret)]), *node_rules(name)]


def _words(passwords: Iterable[str]) -> list[str]:
    """Passwords as hashes; everything that the user could do before is removed."""
    hashes = [f"#{hashlib.sha256(password.encode()).hexdigest()}" for password in passwords]
    return ["reset", "on", *hashes]


def _join_passwords() -> list[str]:
    """The configured password, else one derived from each accepted server key."""
    if settings.ENV.redis_join_password:
        return [settings.ENV.redis_join_password]
    return [
        hmac.new(key.encode(), b"redis join", hashlib.sha256).hexdigest()[:32]
        for key in selectors.server_keys()
    ]
