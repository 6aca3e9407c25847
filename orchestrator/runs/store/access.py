"""The configured store: access for nodes with encrypted credentials, and an open file system here.

Nodes write copies; the control plane reads artifacts, deletes copies and checks the access.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from django.conf import settings

from workers.contracts.wire import encrypted_text
from workers.contracts.wire.maintenance.store import StoreAccess, filesystem_options, split_url
from workers.contracts.wire.node_messages import LaunchOrder

PROBE = "orrery-probe"


def configured() -> bool:
    """Whether copies are made."""
    return bool(settings.ENV.store_url)


def access() -> StoreAccess | None:
    """Where the store is, without credentials; None without a store."""
    env = settings.ENV
    if not env.store_url:
        return None
    return StoreAccess(url=env.store_url, endpoint=env.store_endpoint, region=env.store_region)


def with_store(order: LaunchOrder, key: bytes) -> LaunchOrder:
    """The order with the store, its credentials encrypted under the receiver's key."""
    store, env = access(), settings.ENV
    if store is None:
        return order
    if env.store_key:
        text = json.dumps({"key": env.store_key, "secret": env.store_secret})
        sealed = encrypted_text.encrypt(key, text, purpose=order.store_purpose)
        store = store.model_copy(update={"credentials": sealed})
    return order.model_copy(update={"store": store})


def open_store() -> tuple[Any, str]:
    """`(file system, root)`, without contacting it. Raises ValueError without a store."""
    import fsspec

    env = settings.ENV
    if not env.store_url:
        raise ValueError("ORRERY_STORE_URL is not set")
    scheme, root = split_url(env.store_url)
    options = filesystem_options(
        scheme,
        endpoint=env.store_endpoint,
        region=env.store_region,
        key=env.store_key,
        secret=env.store_secret,
    )
    return fsspec.filesystem(scheme, **options), root


def problem() -> str:
    """Write, read and delete a small object; why that failed, empty if it did not."""
    text = secrets.token_hex(8).encode()
    try:
        fs, root = open_store()
        path = f"{root}/{PROBE}-{text.decode()}"
        if fs.protocol[0] == "file" and not fs.isdir(root):
            return f"The folder {root} does not exist on this machine."
        fs.pipe_file(path, text)
        answer = fs.cat_file(path)
        fs.rm_file(path)
    except Exception as error:  # libraries of stores raise errors of many kinds
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "" if answer == text else "The store returned other bytes than were written."
