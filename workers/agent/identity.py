"""Identity of this node: joins once by a token, then uses a secret stored under its home.

The secret is derived on both sides and never sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

import redis

from workers.agent import broker_login
from workers.agent.reports import parse_control
from workers.contracts.wire import envelope, names, versions
from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.broker.tls import tls_options
from workers.contracts.wire.field_versions import message_for
from workers.contracts.wire.node_messages import NodeInventory
from workers.launcher.isolation.acting import as_owner
from workers.launcher.recovery import supervisor_alive
from workers.launcher.rundir import read_json, run_dirs, write_json
from workers.launcher.shipping.redis_link import NodeFile


class NotJoined(RuntimeError):
    """The node may not or cannot join; the message says what to do."""


class Incompatible(NotJoined):
    """The versions of this agent and of the control plane differ too much."""


def node_folder(home: Path, name: str) -> Path:
    """The node's private folder, created with mode 700."""
    folder = home / "agent" / name
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder


def acquire_lock(folder: Path) -> IO[str]:
    """Lock the node's name for as long as the returned file is open. Raises NotJoined."""
    file = open(folder / "lock", "a")  # noqa: SIM115 - held for the life of the process
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise NotJoined(
            f"Another agent of this name already runs here ({folder}). Stop it, or set --name."
        ) from None
    return file


def identify(
    folder: Path, inventory: NodeInventory, *, redis_url: str, token: str | None, patience_s: float
) -> Path:
    """The node file, after joining if it is missing or another token is given.

    Supervisors of release 0.1 follow the node file and write to the shared streams, which the
    node's own user may not: while some run, the file keeps the given URL. Raises NotJoined, or
    Incompatible for a new node.
    """
    path = folder / "node.json"
    known = read_json(path)
    token_id = envelope.join_token_parts(token)[0] if token else None
    if not known and token is None:
        raise NotJoined(
            "This node has not joined yet. Set --join TOKEN (or ORRERY_JOIN); the Nodes page "
            "creates one."
        )
    if not known or token_id not in (None, known["token"]):
        assert token is not None
        node, secret, has_user = _join(token, inventory, redis_url, patience_s)
        known = {"node": node, "secret": secret.hex(), "token": token_id}
        known["redis_user"] = "own" if has_user else "shared"
    url: str = redis_url
    user: broker_login.User = "shared"
    joins_only = broker_access.user_of(redis_url) == broker_access.JOIN_USER
    had_own = known.get("redis_user") == "own"
    if had_own or joins_only or not _has_first_supervisors(folder.parents[1], known["node"]):
        try:
            url, user = broker_login.choose(
                redis_url,
                node=known["node"],
                secret=bytes.fromhex(known["secret"]),
                before=known.get("redis_user"),
            )
        except broker_login.NoLogin as error:
            raise NotJoined(str(error)) from None
    known |= {"redis": url, "redis_user": user, "address": inventory.address}
    _write_private(path, known)
    return path


def _has_first_supervisors(home: Path, node: str) -> bool:
    """Whether attempts on this node have supervisors of release 0.1, which state no version."""
    for run_dir in run_dirs(home):
        with as_owner(run_dir.path):
            here = read_json(run_dir.agent).get("node") == node
            first = "wire" not in read_json(run_dir.supervisor)
            if here and first and supervisor_alive(run_dir):
                return True
    return False


def broker_user(path: Path) -> broker_login.User:
    """Which user of the broker the node file names."""
    return "own" if read_json(path).get("redis_user") == "own" else "shared"


def read(path: Path) -> NodeFile:
    """Read a node file."""
    return NodeFile.read(path)


def _join(
    token: str, inventory: NodeInventory, redis_url: str, patience_s: float
) -> tuple[str, bytes, bool]:
    """`(node, secret, whether the broker has a user for it)`."""
    token_id, key = envelope.join_token_parts(token)
    request = envelope.join_request(token, name=inventory.name)
    deadline = time.monotonic() + patience_s
    sent = reached = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with redis.Redis.from_url(
                redis_url, decode_responses=True, socket_timeout=15, **tls_options(redis_url)
            ) as client:
                client.ping()
                reached = True
                if not sent:
                    control = parse_control(client.get(names.CONTROL))
                    body = _join_body(request, inventory, control)
                    limited = broker_access.user_of(redis_url) == broker_access.JOIN_USER
                    stream = names.JOINS if control or limited else names.REPORTS
                    # the node has no secret yet: the token's key seals the message
                    ttl_s = patience_s + 60
                    text = envelope.seal(
                        key, names.KIND_JOIN, body, ttl_s=ttl_s, now=time.time(), node=token_id
                    )
                    client.xadd(stream, {names.FIELD_MESSAGE: text})
                    sent = True
                answer = client.blpop(
                    [names.join_reply_key(request["nonce_a"])], timeout=min(5.0, max(0.1, left))
                )
        except (redis.RedisError, OSError) as error:
            if isinstance(error, redis.AuthenticationError) and not reached:
                raise NotJoined(
                    f"The broker refuses the user or password of --redis: {error}. Copy the whole "
                    "command from the page that created the token, or create a new token there."
                ) from None
            # a restarted server may have lost the request; the reply is the same
            sent = False
            time.sleep(0.5)
            continue
        if answer is not None:
            reply = json.loads(answer[1])
            return *_accepted(token, request, reply), broker_access.FIELD_USER in reply
    raise NotJoined(
        f"No answer to the join request within {patience_s:.0f} s. Is the scheduler running, and "
        "this its Redis?"
    )


def _join_body(
    request: dict[str, str], inventory: NodeInventory, control: versions.PeerVersion | None
) -> dict[str, Any]:
    """A join request that the control plane reads; one that is not known may be of release 0.1.

    Raises Incompatible.
    """
    if control is not None:
        _check_versions(control)
    wire = versions.FIRST if control is None else control.wire or versions.WIRE
    return {
        "request": request,
        "inventory": message_for(inventory, wire),
        "release": versions.RELEASE,
        "wire": str(versions.WIRE),
    }


def _check_versions(control: versions.PeerVersion) -> None:
    judgment = versions.judge(control, name="the control plane", own_name="agent")
    if judgment.skew is versions.Skew.REFUSED:
        raise Incompatible(f"This node cannot join. {judgment}")


def _accepted(token: str, request: dict[str, str], reply: dict[str, Any]) -> tuple[str, bytes]:
    if "refused" in reply:
        refused = Incompatible if reply.get("code") == names.INCOMPATIBLE else NotJoined
        raise refused(f"The control plane refused: {reply['refused']}")
    _check_versions(versions.parse_peer(reply.get("release"), reply.get("wire")))
    try:
        return envelope.join_accept(token, request, reply)
    except envelope.EnvelopeError as error:
        raise NotJoined(str(error)) from None


def _write_private(path: Path, data: dict[str, Any]) -> None:
    before = os.umask(0o077)
    try:
        write_json(path, data)
    finally:
        os.umask(before)
