"""Which wire version added a field, and messages without the fields that their receiver lacks.

Release 0.1 refuses unknown fields, so messages to it must not have any. Pure. Does not depend on
who sends a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from workers.contracts.base import Contract
from workers.contracts.wire.versions import WireVersion


@dataclass(frozen=True, slots=True)
class Since:
    """Annotates a field of a message that an earlier wire version does not have."""

    major: int
    minor: int

    @property
    def version(self) -> WireVersion:
        """The first version with the field."""
        return WireVersion(self.major, self.minor)


def message_for(message: Contract, peer: WireVersion) -> dict[str, Any]:
    """The message's JSON data with the fields that a receiver of version `peer` knows."""
    data = message.to_dict()
    _remove_newer(message, data, peer)
    return data


def _remove_newer(message: BaseModel, data: dict[str, Any], peer: WireVersion) -> None:
    for name, field in type(message).model_fields.items():
        key = field.serialization_alias or field.alias or name
        if key not in data:
            continue
        if any(isinstance(mark, Since) and mark.version > peer for mark in field.metadata):
            del data[key]
            continue
        value = getattr(message, name)
        pairs = zip(value, data[key], strict=True) if isinstance(value, list) else ()
        for inner, plain in [(value, data[key]), *pairs]:
            if isinstance(inner, BaseModel):
                _remove_newer(inner, plain, peer)
