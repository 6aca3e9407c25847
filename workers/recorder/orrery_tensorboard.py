"""Reads scalars of a growing TensorBoard event file without TensorFlow or tensorboard.

Parses TFRecord and three protobuf messages: tensorflow/core/lib/io/record_writer.h,
framework/summary.proto, util/event.proto.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FLOAT, _DOUBLE = 1, 2  # DataType of framework/types.proto
_FRAME = 12  # u64 length and its checksum


class Scalar(NamedTuple):
    """One value of a tag at a step; `time` in Unix seconds."""

    tag: str
    step: int
    time: float
    value: float


def read_scalars(file: Path, offset: int, limit: int) -> tuple[list[Scalar], int, bool]:
    """Scalars of the complete records after `offset`, the offset behind them, and whether the file
    has more complete records.

    Reads about `limit` bytes, or one record if that is longer.
    """
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(offset)
        data = stream.read(limit)
        if len(data) >= _FRAME:
            (length,) = struct.unpack_from("<Q", data, 0)
            first = _FRAME + length + 4
            if len(data) < first <= size - offset:
                data += stream.read(first - len(data))
    scalars: list[Scalar] = []
    at = 0
    while at + _FRAME <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + _FRAME + length + 4 > len(data):
            break
        scalars += _event(data[at + _FRAME : at + _FRAME + length])
        at += _FRAME + length + 4
    return scalars, offset + at, at > 0 and size - offset > len(data)


def _event(data: bytes) -> Iterator[Scalar]:
    time, step, summaries = 0.0, 0, []
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            (time,) = struct.unpack("<d", value)
        elif field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for field, value in _fields(summary):
            if field == 1 and isinstance(value, bytes):
                tag, number = _value(value)
                if tag and number is not None:
                    yield Scalar(tag, step, time, number)


def _value(data: bytes) -> tuple[str, float | None]:
    """Tag and number of one Summary.Value: `simple_value`, or a tensor of one element."""
    tag, number = "", None
    for field, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            tag = value.decode("utf-8", "replace")
        elif field == 2 and len(value) == 4:
            (number,) = struct.unpack("<f", value)
        elif field == 8:
            number = _tensor(value)
    return tag, number


def _tensor(data: bytes) -> float | None:
    kind, content = 0, b""
    for field, value in _fields(data):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(
            value, bytes
        ):  # tensor_content, float_val, double_val
            content = value
    if kind == _FLOAT and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    if kind == _DOUBLE and len(content) == 8:
        return float(struct.unpack("<d", content)[0])
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """`(field number, value)`; fixed-width and length-delimited values as bytes, varints as
    numbers.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield field, number
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            return  # groups: not in these messages
        yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return number, at
