"""Bodies of the event types that the control plane reads; other types may have any body.

Does not depend on how events are stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from workers.contracts.base import WireContract, validation_problems
from workers.contracts.specs.model import Count
from workers.contracts.wire.points import MAX_EVENT_BYTES

INVALID: Final = "invalid_event"  # the type under which an event with an invalid body is stored


class CheckpointSaved(WireContract):
    """A complete checkpoint; `path` is relative to the data directory, sizes are in bytes."""

    step: Count | None = None  # null: only shown, not recorded as a checkpoint
    path: Annotated[str, Field(max_length=4096)] = ""
    tokens: Count | None = None
    bytes: Count | None = None


class PeakMeasured(WireContract):
    """The peak of one device that a run measured; its MFU divides by it."""

    tflops: Annotated[float, Field(strict=True, gt=1e-6, lt=1e6)]
    precision: Annotated[str, Field(max_length=40)] | None = None


_BODIES: Final[Mapping[str, type[WireContract]]] = {
    "checkpoint_saved": CheckpointSaved,
    "peak_measured": PeakMeasured,
}


def size_problem(data: Mapping[str, Any]) -> str | None:
    """Why the data of an event is too large to be stored; None if it is not."""
    size = len(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode())
    if size <= MAX_EVENT_BYTES:
        return None
    return (
        f"The data has {size:,} bytes and was not stored; an event may have {MAX_EVENT_BYTES:,}. "
        "Write large data to a file and name the file in the event."
    )


def body_problem(type_: str, data: Mapping[str, Any]) -> str | None:
    """What is wrong with the body of a known event type; None if it is valid or not known."""
    contract = _BODIES.get(type_)
    if contract is None:
        return None
    try:
        contract.from_dict(data)
    except ValidationError as error:
        return "; ".join(str(problem) for problem in validation_problems(error))
    return None
