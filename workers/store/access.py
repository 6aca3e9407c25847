"""Opens the store by fsspec, and explains its errors.

Does not depend on what is stored.
"""

from __future__ import annotations

import errno
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import fsspec

from workers.contracts.wire.maintenance.store import (
    StoreProblem,
    filesystem_options,
    split_url,
)

_FULL = {
    "XMinioStorageFull",
    "QuotaExceeded",
    "InsufficientStorage",
    "XMinioAdminBucketQuotaExceeded",
}
_CREDENTIALS = {
    "AccessDenied",
    "AllAccessDisabled",
    "AuthFailure",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "403",
    "401",
}
_BUCKET = {"NoSuchBucket", "PermanentRedirect", "IllegalLocationConstraintException"}
_Reason = Literal["full", "credentials", "bucket", "unreachable", "other"]


@dataclass(frozen=True, slots=True)
class Store:
    """An open store: `root` is a folder, or bucket and prefix."""

    fs: Any
    root: str
    scheme: str

    def path(self, key: str) -> str:
        """The object or folder of a key."""
        return f"{self.root}/{key}"


def open_store(
    *, url: str, endpoint: str = "", region: str = "", key: str = "", secret: str = ""
) -> Store:
    """Open the store without contacting it. Raises ValueError for a URL of another kind."""
    scheme, root = split_url(url)
    options = filesystem_options(scheme, endpoint=endpoint, region=region, key=key, secret=secret)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the library's own imports
        return Store(fsspec.filesystem(scheme, **options), root, scheme)


def explain(error: BaseException, store: Store) -> StoreProblem:
    """Why the store refused, in one sentence, with a hint."""
    reason = _reason(error)
    place = f"{store.scheme}://{store.root}"
    bucket = store.root.partition("/")[0]
    cause = _cause(error)
    messages: dict[str, tuple[str, str]] = {
        "full": (
            f"The store {place} is full: {cause}",
            "Free space or raise its quota; garbage collection of the store is set by "
            "ORRERY_GC_STORE_DAYS and ORRERY_GC_STORE_GB.",
        ),
        "credentials": (
            f"The store {place} refuses the credentials: {cause}",
            "Check ORRERY_STORE_KEY and ORRERY_STORE_SECRET, and that they may list, read, write "
            "and delete objects there.",
        )
        if store.scheme == "s3"
        else (
            f"The folder {store.root} of the store may not be used: {cause}",
            "Let the users of runs write to it, with whose rights copies are made, or use a "
            "bucket.",
        ),
        "bucket": (
            f"The store {place} has no bucket {bucket}: {cause}"
            if store.scheme == "s3"
            else f"The folder {store.root} of the store does not exist: {cause}",
            "Create it, or correct ORRERY_STORE_URL, ORRERY_STORE_ENDPOINT and "
            "ORRERY_STORE_REGION.",
        ),
        "unreachable": (
            f"The store {place} does not answer: {cause}",
            "Check ORRERY_STORE_ENDPOINT and the network between this machine and the store.",
        ),
        "other": (f"The store {place} failed: {cause}", "See the store's own log."),
    }
    message, hint = messages[reason]
    return StoreProblem(reason=reason, message=message[:400], hint=hint)


def _reason(error: BaseException) -> _Reason:
    codes, numbers, names = set(), set(), set()
    link: BaseException | None = error
    while link is not None:
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            codes.add(str((response.get("Error") or {}).get("Code", "")))
            codes.add(str((response.get("ResponseMetadata") or {}).get("HTTPStatusCode", "")))
        if isinstance(link, OSError) and link.errno:
            numbers.add(link.errno)
        names.add(type(link).__name__)
        link = link.__cause__ or link.__context__
    if codes & _FULL or "507" in codes or numbers & {errno.ENOSPC, errno.EDQUOT}:
        return "full"
    if codes & _BUCKET or "FileNotFoundError" in names or errno.ENOENT in numbers:
        return "bucket"
    if (
        codes & _CREDENTIALS
        or names & {"NoCredentialsError", "PartialCredentialsError", "PermissionError"}
        or numbers & {errno.EACCES, errno.EPERM, errno.EROFS}
    ):
        return "credentials"
    if names & {
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ConnectionError",
        "ConnectionClosedError",
        "HTTPClientError",
        "TimeoutError",
        "FSTimeoutError",
        "ConnectionRefusedError",
        "ServerDisconnectedError",
        "gaierror",
    } or any(code in codes for code in ("500", "502", "503", "504")):
        return "unreachable"
    return "other"


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[:200].rstrip('.')}."
