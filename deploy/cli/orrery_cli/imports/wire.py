"""Reads messages of the Protocol Buffers wire format without their schema.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """`(field number, value)`; varints as numbers, the others as bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"byte {at} begins a field of the unknown type {kind}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {at} ends after the record")
        yield number, data[at : at + size]
        at += size


def all_of(data: bytes, number: int) -> list[bytes]:
    """The messages or texts of a repeated field."""
    return [value for each, value in fields(data) if each == number and isinstance(value, bytes)]


def one(data: bytes, number: int) -> bytes | None:
    """The last message or text of a field, which wins; None without one."""
    values = all_of(data, number)
    return values[-1] if values else None


def text(data: bytes, number: int) -> str:
    """A text field; empty without one."""
    return (one(data, number) or b"").decode("utf-8", "replace")


def integer(data: bytes, number: int) -> int:
    """A field of type int64; 0 without one."""
    values = [value for each, value in fields(data) if each == number and isinstance(value, int)]
    value = values[-1] if values else 0
    return value - (1 << 64) if value >= 1 << 63 else value


def doubles(data: bytes, number: int) -> list[float]:
    """A repeated field of type double, packed or not."""
    packed = b"".join(all_of(data, number))
    return [each[0] for each in struct.iter_unpack("<d", packed[: len(packed) // 8 * 8])]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError(f"the number at byte {at} is too long")
    raise ValueError("the record ends within a number")
