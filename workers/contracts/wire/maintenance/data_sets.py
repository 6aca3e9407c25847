"""Data sets: what a node needs to provide one, and the words of the process that registers one.

A copy in the store is named by its content. Does not read files.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count
from workers.contracts.wire.maintenance.store import CopyIndex, Key, StoredFile, StoreProblem
from workers.contracts.wire.maintenance.store_work import StoreLogin

MOST_FILES: Final = 10_000  # of a data set; each is named in launch orders


class DataInput(WireContract):
    """A data set of a launch order: `name` is `NAME@VERSION`, `fields` the spec's paths to it.

    `path` is where the control plane had it, a folder with `files` or the only file. `key` is its
    copy in the store.
    """

    name: str
    fields: list[str] = []
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    folder: bool = False
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Count
    files: Annotated[dict[str, StoredFile], Field(max_length=MOST_FILES)]
    key: Key | None = None


class DataRequest(WireContract):
    """Hash a file or folder, or look for the copy `key`; with `login`, copy into the store."""

    path: str = ""
    login: StoreLogin | None = None
    key: Key | None = None


class DataAnswer(WireContract):
    """A line of the answer: the files with their fingerprint, then the copy's key or a problem.

    `unreadable`: why the files cannot be registered; a repetition does not help.
    """

    index: CopyIndex | None = None
    stored: Key | None = None
    sent_bytes: Count = 0
    problem: StoreProblem | None = None
    unreadable: str = ""


def data_key(fingerprint: str) -> str:
    """The key of a data set's copy: equal content has one copy."""
    return f"data/{fingerprint}"
