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

from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import NodeInventory
from workers.launcher.rundir import read_json, write_json
from workers.launcher.shipping.redis_link import NodeFile


class NotJoined(RuntimeError):
    """The node may not or cannot join; the message says what to do."""


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

    Raises NotJoined.
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
        node, secret = _join(token, inventory, redis_url, patience_s)
        known = {"node": node, "secret": secret.hex(), "token": token_id}
    _write_private(path, {**known, "redis": redis_url, "address": inventory.address})
    return path


def read(path: Path) -> NodeFile:
    """Read a node file."""
    return NodeFile.read(path)


def _join(
    token: str, inventory: NodeInventory, redis_url: str, patience_s: float
) -> tuple[str, bytes]:
    token_id, key = envelope.join_token_parts(token)
    request = envelope.join_request(token, name=inventory.name)
    body = {"request": request, "inventory": inventory.to_dict()}
    # the node has no secret yet: the token's key seals the message
    text = envelope.seal(
        key, names.KIND_JOIN, body, ttl_s=patience_s + 60, now=time.time(), node=token_id
    )
    deadline = time.monotonic() + patience_s
    sent = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with redis.Redis.from_url(
                redis_url, decode_responses=True, socket_timeout=15
            ) as client:
                if not sent:
                    client.xadd(names.REPORTS, {names.FIELD_MESSAGE: text})
                    sent = True
                answer = client.blpop(
                    [names.join_reply_key(request["nonce_a"])], timeout=min(5.0, max(0.1, left))
                )
        except (redis.RedisError, OSError):
            # a restarted server may have lost the request; the reply is the same
            sent = False
            time.sleep(0.5)
            continue
        if answer is not None:
            return _accepted(token, request, json.loads(answer[1]))
    raise NotJoined(
        f"No answer to the join request within {patience_s:.0f} s. Is the scheduler running, and "
        "this its Redis?"
    )


def _accepted(token: str, request: dict[str, str], reply: dict[str, Any]) -> tuple[str, bytes]:
    if "refused" in reply:
        raise NotJoined(f"The control plane refused: {reply['refused']}")
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
