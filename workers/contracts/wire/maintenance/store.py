"""Access to the store, names of copies in it, and the index that makes a copy complete.

A copy is a folder of objects. Its index is written last, so a copy without index does not exist.
Does not depend on a storage library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count

INDEX: Final = "orrery-copy.json"
INDEX_VERSION: Final = 1
SCHEMES: Final = ("file", "s3")
Key = Annotated[str, Field(min_length=1, max_length=500)]


class StoreAccess(WireContract):
    """Where the store is. `credentials` is encrypted JSON `{key, secret}` for one receiver; empty:
    the receiver's own environment, profile or instance role.
    """

    url: Annotated[str, Field(min_length=1, max_length=500)]
    endpoint: Annotated[str, Field(max_length=500)] = ""
    region: Annotated[str, Field(max_length=60)] = ""
    credentials: Annotated[str, Field(max_length=4000)] = ""


class StoredFile(WireContract):
    """One file of a copy."""

    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CopyIndex(WireContract):
    """The last object of a copy: its files, and the fingerprint of all of them."""

    version: int = INDEX_VERSION
    kind: Literal["checkpoint", "artifact", "data"]
    fingerprint: str
    bytes: Count
    files: dict[str, StoredFile]
    about: dict[str, Any] = {}  # of a checkpoint: run, attempt, step, tokens


class CopyStored(WireContract):
    """Body of the events `checkpoint_stored` and `artifact_stored`: a complete copy.

    `sent_bytes` is less than `bytes` if an interrupted upload was resumed.
    """

    key: Key
    bytes: Count
    fingerprint: Annotated[str, Field(max_length=64)]
    step: Count | None = None  # of a checkpoint
    name: Annotated[str | None, Field(max_length=200)] = None  # of an artifact
    seconds: Annotated[float, Field(ge=0)] = 0.0
    sent_bytes: Count = 0


class StoreProblem(WireContract):
    """Body of the event `store_problem`: why an upload or a download waits."""

    reason: Literal["full", "credentials", "bucket", "unreachable", "other"]
    message: Annotated[str, Field(max_length=400)]
    hint: Annotated[str, Field(max_length=400)]
    retry_s: Annotated[float, Field(ge=0)] = 0.0


def fingerprint(files: Mapping[str, StoredFile]) -> str:
    """SHA-256 over names, sizes and digests in the order of names; equal files, equal text."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name].bytes}\0{files[name].sha256}\n".encode())
    return digest.hexdigest()


def copy_key(run: str, kind: str, name: str, fingerprint: str) -> str:
    """The key of a run's copy; other content has another key."""
    return f"runs/{run}/{kind}s/{name}-{fingerprint[:12]}"


def split_url(url: str) -> tuple[str, str]:
    """`(scheme, root)`: `file:///a` and `/a` are the folder `/a`, `s3://b/c` the root `b/c`.

    Raises ValueError for another scheme or a relative path.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file") and parts.path.startswith("/") and not parts.netloc:
        return "file", parts.path.rstrip("/") or "/"
    if parts.scheme == "s3" and parts.netloc:
        return "s3", f"{parts.netloc}{parts.path}".rstrip("/")
    raise ValueError(f"{url!r} is neither s3://bucket/prefix nor an absolute folder (file:///…)")


def filesystem_options(
    scheme: str, *, endpoint: str, region: str, key: str, secret: str
) -> dict[str, Any]:
    """Arguments of `fsspec.filesystem` for this access."""
    if scheme == "file":
        return {"auto_mkdir": True}
    options: dict[str, Any] = {
        "skip_instance_cache": True,
        "use_listings_cache": False,
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"max_attempts": 2},
        },
    }
    if endpoint:
        options["endpoint_url"] = endpoint
    if region:
        options["client_kwargs"] = {"region_name": region}
    if key:
        options |= {"key": key, "secret": secret}
    return options
