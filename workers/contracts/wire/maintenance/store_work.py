"""Lines between a supervisor and the process that copies its files into the store.

The first line to the process is `StoreLogin`, each further one `StoreWork`; an empty line says that
no work follows. The process answers with one `StoreDone` per event.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.wire.maintenance.store import CopyStored, StoreAccess, StoreProblem


class StoreLogin(WireContract):
    """The store, with readable credentials; `first_wait_s` before a failed copy is repeated."""

    access: StoreAccess
    key: str = ""
    secret: str = ""
    first_wait_s: Annotated[float, Field(gt=0)] = 5.0


class StoreWork(WireContract):
    """One file or folder to copy; `number` is repeated in the answer.

    A checkpoint is held by hard links below `hold`, so that its run may delete its own name.
    """

    number: int
    kind: Literal["checkpoint", "artifact"]
    source: str
    run: str
    name: str
    hold: str | None = None
    about: dict[str, Any] = {}


class StoreDone(WireContract):
    """What became of a piece of work: a complete copy, a problem that is retried, or neither (it
    was dropped: the reason).
    """

    number: int
    stored: CopyStored | None = None
    problem: StoreProblem | None = None
    dropped: str = ""
